"""The blocks of a published version: about a row each, so that few bytes are fetched for few rows."""

import json
import os
import pickle
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from inside import give_back, mirror_of
from range_server import RangeServer

from memmap_buffer import ConcatBuffer, CorruptBufferError, ReplayBuffer, check_cache, pack, publish, pull, verify
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.source import BLOCK, Rows
from memmap_buffer.remote import layout
from memmap_buffer.remote.blocks import COUNTER
from memmap_buffer.remote.layout import DataFiles, sizes_of_blocks
from memmap_buffer.remote.mirror import fetch

GOLDEN = Path(__file__).parent.parent / "format" / "golden"
STEPS = {"timestep_level": True}
SHAPES = {"state": (16,), "image": (100, 100), "reward": (), "done": ()}
FIELDS = {"state": ("float", (16,)), "image": ("uint8", (100, 100)), "reward": "float", "done": "bool"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`near` is a packed folder, whose images have 20 MB, and `far` what was published of it."""
    place, rng = tmp_path_factory.mktemp("root"), np.random.default_rng(0)
    with ReplayBuffer(place / "grid", 20, 100, FIELDS) as buffer:
        for _ in range(20):
            shapes = {name: (100, *(() if isinstance(spec, str) else spec[1])) for name, spec in FIELDS.items()}
            buffer.store_episode(**{name: rng.integers(0, 2, shape) for name, shape in shapes.items()})
    pack(place / "grid", place / "near")
    publish(place / "near", f"file://{place}/far")
    return place


def layout_of(root: Path) -> Layout:
    return Layout.from_json((root / "near" / "schema.json").read_bytes(), "")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert torch.equal(values, other[key]), key


def test_a_block_has_room_for_a_row_and_a_small_file_is_one_block(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = sizes_of_blocks(layout_of(root))
    assert few == {
        "data/state.npy": BLOCK,
        "data/image.npy": 16384,
        "data/reward.npy": BLOCK,
        "data/done.npy": BLOCK,
    }
    monkeypatch.setattr(layout, "BLOCK", 4096)
    assert set(sizes_of_blocks(layout_of(root)).values()) == {4096}


def test_blocks_are_larger_where_there_would_be_too_many(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DataFiles(layout_of(root))
    for most, expected in ((2000, 16384), (1000, 32768), (10, BLOCK)):
        monkeypatch.setattr(layout, "MOST_BLOCKS", most)
        assert sizes_of_blocks(layout_of(root))["data/image.npy"] == expected
    assert files.num_digests == files.count == len(files.groups)


def test_a_few_rows_take_few_bytes_and_then_their_groups_are_fetched_whole(root: Path, tmp_path: Path) -> None:
    near, sent = ReplayBuffer.from_folder(root / "near"), []
    with RangeServer(root / "far") as server:
        far = ReplayBuffer.from_folder(f"{server.url}/near", cache=tmp_path)
        for seed in range(3):
            server.told()
            options = {**STEPS, "fields": ["image"], "seed": seed}
            equal(near.sample(8, **options), far.sample(8, **options))
            sent.append(server.told()["sent"])
        blocks, files = mirror_of(far).blocks, mirror_of(far).files
        equal(near.batch(**STEPS), far.batch(**STEPS))
        assert mirror_of(far).whole() is not None
    assert sent[0] < 8 * 2 * 16384 + 8 * files.num_digests + 1000
    assert max(sent) <= 8 * 2 * BLOCK
    assert (blocks.words[:, COUNTER] == 2).all()  # each was fetched once


@pytest.mark.parametrize(("num_bytes", "is_whole"), [(BLOCK // 4, False), (BLOCK // 2, True)])
def test_a_group_of_which_half_is_wanted_is_fetched_whole(
    root: Path, tmp_path: Path, num_bytes: int, is_whole: bool
) -> None:
    mirror = mirror_of(ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path))
    chosen = np.unique(mirror.blocks_of("data/image.npy", np.array([BLOCK]), np.array([BLOCK + num_bytes])))
    fetch({mirror: chosen})
    assert not len(mirror.blocks.absent(chosen))
    assert (not len(mirror.blocks.absent(mirror.files.in_groups(chosen)))) == is_whole


def test_a_group_that_is_come_to_again_is_fetched_whole(root: Path, tmp_path: Path) -> None:
    mirror = mirror_of(ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path))
    first = mirror.files.first["data/image.npy"]
    of_group = mirror.files.in_groups(np.array([first]))
    fetch({mirror: np.array([first])})
    assert mirror.blocks.absent(of_group).tolist() == of_group[1:].tolist()
    fetch({mirror: np.array([first])})
    assert mirror.blocks.absent(of_group).tolist() == of_group[1:].tolist()
    fetch({mirror: np.array([first + 5])})
    assert not len(mirror.blocks.absent(of_group))
    assert len(mirror.blocks.absent(np.arange(mirror.files.count))) == mirror.files.count - len(of_group)


def test_a_cache_that_cannot_keep_all_gets_no_more_than_the_blocks_of_the_rows(root: Path, tmp_path: Path) -> None:
    with RangeServer(root / "far") as server:
        far = ReplayBuffer.from_folder(f"{server.url}/near", cache=tmp_path, cache_bytes=16 * BLOCK)
        for seed in range(4):
            server.told()
            far.sample(8, seed=seed, fields=["image"], **STEPS)
            assert server.told()["sent"] < 8 * 3 * 16384 + 10_000


def test_a_cache_that_keeps_some_of_many_shards_gets_no_more_either(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "far"
    for name in ("one", "two", "three"):
        copy = ReplayBuffer(tmp_path / name, 20, 100, FIELDS)
        for episode in range(20):
            copy.store_episode(**{key: np.full((100, *spec), episode % 2) for key, spec in SHAPES.items()})
        copy.close()
        publish(tmp_path / name, f"file://{place}")
    with RangeServer(place) as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path / "cache", cache_bytes=160 * BLOCK)
        for seed in range(40):
            server.told()
            far.sample(1, seed=seed, fields=["image"], **STEPS)
            if seed > 10:
                assert server.told()["sent"] <= 2 * 16384


def test_what_another_release_kept_goes_before_the_bound_is_passed(root: Path, tmp_path: Path) -> None:
    far = ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path, cache_bytes=40 * BLOCK)
    before = mirror_of(far).path
    far.sample(8, seed=0, **STEPS)
    far.close()
    other = before.rename(before.with_name(f"{'0' * 32}-{'1' * 32}"))
    words = other / "mirror" / "blocks.npy"
    content = words.read_bytes()
    words.unlink()  # as it is mapped
    words.write_bytes(content[:-8])
    far = ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path, cache_bytes=40 * BLOCK)
    for seed in range(40):
        far.sample(16, seed=seed, **STEPS)
    assert not other.exists()
    assert sum(512 * file.stat().st_blocks for file in tmp_path.rglob("*.npy")) < 41 * BLOCK


def test_blocks_whose_group_is_right_are_not_fetched_again_for_ever(root: Path, tmp_path: Path) -> None:
    far = ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path)
    far.batch(**STEPS)
    mirror = mirror_of(far)
    digests, group = mirror.digests.copy(), mirror.files.in_groups(mirror.files.groups[1:2])
    digests[group] ^= np.uint64(1)  # as nobody publishes them
    vars(mirror)["digests"] = digests
    rows = Rows("image", np.array([0]), np.array([2000]))
    assert not mirror.mend(rows)
    name, begin, _ = mirror.files.place(int(group[2]))
    with (mirror.path / name).open("r+b") as file:
        file.seek(begin + 5)
        file.write(b"\xff")
    assert mirror.mend(rows)
    assert mirror.blocks.absent(np.arange(mirror.files.count)).tolist() == group.tolist()


def test_what_was_whole_is_looked_at_again_after_a_block_was_given_back(root: Path, tmp_path: Path) -> None:
    far = ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path)
    near = ReplayBuffer.from_folder(root / "near").batch(**STEPS)
    equal(near, far.batch(**STEPS))
    mirror = mirror_of(far)
    for block in (0, mirror.files.count - 1):
        taken = mirror.whole()
        assert taken is not None
        assert taken.unchanged()
        assert give_back(mirror, block)
        assert not taken.unchanged()
        assert mirror.whole() is None
        equal(near, far.batch(**STEPS))


def test_a_check_that_finds_nothing_disturbs_no_reader(root: Path, tmp_path: Path) -> None:
    far = ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path)
    far.batch(**STEPS)
    taken = mirror_of(far).whole()
    assert taken is not None
    assert check_cache(tmp_path) == {}
    assert taken.unchanged()


def test_ranges_that_lie_over_each_other_take_the_memory_of_their_blocks(root: Path, tmp_path: Path) -> None:
    mirror, rng = (
        mirror_of(ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path)),
        np.random.default_rng(0),
    )
    size, first = mirror.files.sizes["data/image.npy"], mirror.files.first["data/image.npy"]
    for longest in (20_000, 100_000, size):
        begin = rng.integers(0, size, 20)
        end = np.minimum(begin + rng.integers(1, longest, 20), size)
        expected = {
            first + b for low, high in zip(begin, end, strict=True) for b in range(low // 16384, -(-high // 16384))
        }
        assert set(mirror.blocks_of("data/image.npy", begin, end).tolist()) == expected
    count = 10_000  # of rows of which each tells that it has all bytes
    tracemalloc.start()
    try:
        assert len(mirror.blocks_of("data/image.npy", np.zeros(count, np.int64), np.full(count, size))) < 3 * count
        assert tracemalloc.get_traced_memory()[1] < 200 * count
    finally:
        tracemalloc.stop()


def test_wrong_bytes_are_found_whether_a_block_is_checked_or_a_group(root: Path, tmp_path: Path) -> None:
    mirror = mirror_of(ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path))
    data, first = (root / "near" / "data" / "image.npy").read_bytes(), mirror.files.first["data/image.npy"]
    pieces = [[first], [first, first + 2], list(range(first + 3, first + 70)), list(range(first, first + 1221))]
    for piece in pieces:
        _, begin, stop = mirror.files.range_of(piece)
        assert mirror.is_right(piece, data[begin:stop])
        for at in (0, (stop - begin) // 2, stop - begin - 1):
            wrong = bytearray(data[begin:stop])
            wrong[at] ^= 1
            assert not mirror.is_right(piece, bytes(wrong))


def test_blocks_of_a_file_that_was_cut_short_are_not_right(root: Path, tmp_path: Path) -> None:
    mirror = mirror_of(ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path))
    first = mirror.files.first["data/image.npy"]
    fetch({mirror: np.arange(first, first + 64)})
    os.truncate(mirror.path / "data" / "image.npy", 3 * BLOCK)
    assert sum(check_cache(tmp_path).values()) == BLOCK
    data = (root / "near" / "data" / "image.npy").read_bytes()
    assert mirror.is_right([first, first + 1], data[:32768])
    assert not any(mirror.is_right([first, first + 1], data[:size]) for size in (0, 16384, 32767, 32769))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"1", b"\xff", "fewer", "more", 0, 4095, 5000, 2 * BLOCK, 4096.0, True, "4096", None],
    ids=str,
)
def test_sizes_that_are_none_are_refused(root: Path, content: object) -> None:
    sizes: dict[str, object] = dict(sizes_of_blocks(layout_of(root)))
    if content == "fewer":
        sizes.popitem()
    elif content == "more":
        sizes["data/other.npy"] = 4096
    else:
        sizes["data/image.npy"] = content
    data = content if isinstance(content, bytes) else json.dumps(sizes).encode()
    with pytest.raises(CorruptBufferError, match=r"blocks\.json: got .*expected the sizes of the blocks"):
        DataFiles(layout_of(root), data)


def test_sizes_of_many_bytes_are_refused_before_they_are_parsed(root: Path) -> None:
    data, folder = b"[" + b"[]," * (layout.MAX_SIZES_BYTES // 3) + b"1]", layout_of(root)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBufferError, match=r"blocks\.json: got"):
            DataFiles(folder, data)
        assert tracemalloc.get_traced_memory()[1] < len(data)
    finally:
        tracemalloc.stop()


def test_more_blocks_than_readers_have_locks_for_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, one = layout_of(root), sizes_of_blocks(layout_of(root))
    count = DataFiles(folder, json.dumps(one).encode()).count
    monkeypatch.setattr(layout, "MAX_BLOCKS", count - 1)
    with pytest.raises(CorruptBufferError, match=r"blocks\.json: got"):
        DataFiles(folder, json.dumps(one).encode())
    monkeypatch.setattr(layout, "MAX_BLOCKS", 10)
    assert DataFiles(folder, json.dumps(dict.fromkeys(one, BLOCK)).encode()).count > 10
    monkeypatch.setattr(layout, "MAX_BLOCKS", count)
    assert DataFiles(folder, json.dumps(one).encode()).count == count


def test_an_interrupted_opening_leaves_no_blocks_of_other_sizes(root: Path, tmp_path: Path) -> None:
    mirror = mirror_of(ReplayBuffer.from_folder(f"file://{root}/far/near", cache=tmp_path))

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        if "layout" in vars(new):
            raise KeyboardInterrupt("while it is opened")
        return interrupt if frame.f_code.co_name in ("open", "layout") else None

    new = pickle.loads(pickle.dumps(mirror))
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="while it is opened"):
            _ = new.layout
    finally:
        sys.settrace(before)
    assert new.files.block == mirror.files.block


def test_what_version_1_published_is_read_and_pulled(tmp_path: Path) -> None:
    url = f"file://{GOLDEN}/v1-published"
    options = {**STEPS, "format": "numpy"}
    expected = ReplayBuffer.from_folder(GOLDEN / "v1-packed").batch(**options)
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    one = ReplayBuffer.from_folder(f"{url}/v1-packed", cache=tmp_path / "cache")
    assert repr(far.batch(**options)) == repr(one.batch(**options)) == repr(expected)
    assert set(mirror_of(one).files.block.values()) == {BLOCK}
    pull(url, tmp_path / "copy")
    assert verify(tmp_path / "copy" / "v1-packed") == []


def test_what_version_1_published_and_was_joined_is_not_published_again(tmp_path: Path) -> None:
    far = shutil.copytree(GOLDEN / "v1-published", tmp_path / "far")
    shutil.copytree(far / "v1-packed", far / "joined")
    root = layout.Root.from_json((far / "root.json").read_bytes(), "")
    listed = root.with_joined(["v1-packed"], "joined").with_shards({"joined": root.shards["v1-packed"]}, {}).to_json()
    (far / "root.json").write_bytes(listed)
    assert publish(GOLDEN / "v1-packed", f"file://{far}") == []
    assert (far / "root.json").read_bytes() == listed


def test_a_pulled_folder_has_the_files_that_were_published_and_no_others(root: Path, tmp_path: Path) -> None:
    pull(f"file://{root}/far", tmp_path)
    files = [{str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (tmp_path / "near", root / "near")]
    assert files[0] == files[1]
    assert verify(tmp_path / "near") == []
