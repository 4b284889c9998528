"""The cache of a host: rotten bytes in it are fetched again, it is shown, checked and emptied beside readers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import around, get_inside, mirror_of, mirrors_of, set_inside, storage_of

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotABufferError,
    RemoteError,
    ReplayBuffer,
    Zstd,
    cache_contents,
    check_cache,
    clear_cache,
    pack,
    publish,
)
from memmap_buffer.format.source import BLOCK, Rows
from memmap_buffer.remote.blocks import COUNTER, LOCAL
from memmap_buffer.remote.mirror import Mirror

FIELDS = {
    "number": "int",
    "state": Field("float32", (600,), final=True),
    "frame": Field("uint8", (64, 64)),
    "ids": ("int64", (None,)),
}
OPTIONS: dict[str, Any] = {"timestep_level": True}
EVERY = [slice(0, 40), slice(1000, 1008), slice(-9, None)]  # of a file's bytes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two shards, and what was published of them."""
    place, rng = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    picture = rng.integers(0, 255, (64, 64), np.uint8)  # which makes a dictionary worth it
    for shard in range(2):
        with ReplayBuffer(place / "near" / f"shard-0000{shard}", 4, 100, FIELDS, {"task": "int"}) as buffer:
            for serial in range(4):
                buffer.store_episode(
                    number=np.arange(100) + 100 * serial,
                    state=rng.normal(size=(101, 600)).astype(np.float32),
                    frame=picture ^ (rng.random((100, 64, 64)) < 0.01),
                    ids=[np.arange(t % 4) for t in range(100)],
                    task=serial,
                )
        pack(place / "near" / f"shard-0000{shard}", place / f"shard-0000{shard}", codec={"frame": Zstd()})
        publish(place / f"shard-0000{shard}", f"file://{place}/far")
    return place


def rot(path: Path, where: slice) -> None:
    """Flip bytes of a file, behind its header."""
    body = bytearray(path.read_bytes()[128:])
    body[where] = bytes(byte ^ 0x55 for byte in body[where])
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(body)


def equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert np.array_equal(values, other[key]), key


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("where", EVERY, ids=["first", "middle", "last"])
@pytest.mark.parametrize("file", ["number", "state", "frame", "frame.blobs", "ids"])
def test_rotten_bytes_are_fetched_again_where_checksums_are_compared(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, where: slice
) -> None:
    near = ReplayBuffer.from_folder(place / "near" / "shard-00000")
    far = ReplayBuffer.from_folder(f"file://{place}/far/shard-00000", cache=tmp_path, verify="read")
    equal(near.batch(**OPTIONS), far.batch(**OPTIONS))
    (path,) = (tmp_path / mirror_of(far).path.name / "data").glob(f"{file}.npy")
    rot(path, where)
    equal(near.batch(**OPTIONS), far.batch(**OPTIONS))
    (text,) = warnings_of(caplog)
    assert text.startswith(f"file://{place}/far/shard-00000: ")
    assert f"kept in {tmp_path}/" in text
    assert f"`memmap-buffer cache {tmp_path} --check`" in text
    rot(path, where)
    equal(near.batch(**OPTIONS), far.batch(**OPTIONS))
    assert len(warnings_of(caplog)) == 1
    assert check_cache(tmp_path) == {}


def test_rotten_blobs_are_fetched_again_where_they_cannot_be_decoded(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near = ConcatBuffer.from_root(place / "near")
    far = ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path)
    equal(near.batch(**OPTIONS), far.batch(**OPTIONS))
    names = ("frame.npy", "frame.blobs.npy", "frame.dictionary.npy")
    paths = [path for name in names for path in tmp_path.glob(f"*/data/{name}")]
    assert len(paths) == 6
    for path in paths:
        rot(path, slice(None))
        equal(near.batch(**OPTIONS), far.batch(**OPTIONS))
        rot(path, slice(None))
        equal(near[-1], far[-1])
        equal(near.episode(1), far.episode(1))
    assert len(warnings_of(caplog)) == 2  # one a shard
    for path in paths[4:]:  # dictionaries, which are read once
        rot(path, slice(None))
    far = ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path)
    equal(near.batch(**OPTIONS), far.batch(**OPTIONS))


@pytest.mark.parametrize(
    ("verify", "file"), [("auto", "frame"), ("auto", "frame.blobs"), ("auto", "frame.dictionary"), ("read", "state")]
)
@pytest.mark.parametrize(
    "read",
    [lambda far: far.batch(**OPTIONS), lambda far: {"rows": storage_of(far).read_rows("frame", slice(0, 100), 0, 0)}],
    ids=["batch", "rows"],
)
def test_what_another_process_mends_first_is_read_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, verify: str, read: Callable[[Any], Any]
) -> None:
    url, again = f"file://{place}/far/shard-00000", []

    def mend_elsewhere() -> None:
        if not again:
            again.append(True)
            code = f"from memmap_buffer import *; b = ReplayBuffer.from_folder({url!r}, cache={str(tmp_path)!r}, "
            code += f"verify={verify!r}); b.batch(timestep_level=True)"
            subprocess.run([sys.executable, "-c", code], check=True)

    expected = read(ReplayBuffer.from_folder(url, cache=tmp_path, verify=verify))
    ReplayBuffer.from_folder(url, cache=tmp_path).batch(**OPTIONS)
    (path,) = tmp_path.glob(f"*/data/{file}.npy")
    rot(path, slice(None))
    around(monkeypatch, Mirror, "mend", mend_elsewhere)
    far = ReplayBuffer.from_folder(url, cache=tmp_path, verify=verify)
    equal(read(far), expected)
    far.batch(**OPTIONS)
    assert again
    assert len(far) == 4
    assert check_cache(tmp_path) == {}


def test_a_dictionary_that_another_process_mended_is_read_anew(place: Path, tmp_path: Path) -> None:
    url = f"file://{place}/far/shard-00000"
    expected = ReplayBuffer.from_folder(url, cache=tmp_path).batch(**OPTIONS)
    (path,) = tmp_path.glob("*/data/frame.dictionary.npy")
    rot(path, slice(None))
    far = ReplayBuffer.from_folder(url, cache=tmp_path)
    mirror_of(far).coded("frame")  # which keeps it
    assert check_cache(tmp_path)
    equal(far.batch(**OPTIONS), expected)


def test_blocks_that_another_thread_is_at_work_on_are_waited_for(place: Path, tmp_path: Path) -> None:
    url = f"file://{place}/far/shard-00000"
    far = ReplayBuffer.from_folder(url, cache=tmp_path)
    expected = far.batch(**OPTIONS)
    (path,) = tmp_path.glob("*/data/frame.blobs.npy")
    mirror, rows, came = mirror_of(far), Rows("frame", np.array([0]), np.array([100])), list[Any]()
    block = mirror.blocks_of_blobs(rows).tolist()[:1]
    assert not mirror.mend(rows)
    rot(path, slice(None))
    with mirror.blocks.taken(block):
        thread = threading.Thread(target=lambda: came.append(far.batch(**OPTIONS)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    equal(came[0], expected)
    assert check_cache(tmp_path) == {}


def test_what_was_published_broken_is_an_error_as_ever(place: Path, tmp_path: Path) -> None:
    publish(place / "shard-00000", url := f"file://{tmp_path}/far")
    (path,) = (tmp_path / "far").glob("shard-00000/*/data/frame.blobs.npy")
    rot(path, slice(None))
    far = ReplayBuffer.from_folder(f"{url}/shard-00000", cache=tmp_path / "cache")
    with pytest.raises(RemoteError, match="another digest"):
        far.batch(**OPTIONS)


def test_a_check_gives_back_all_that_differs_and_nothing_else(place: Path, tmp_path: Path) -> None:
    near = ConcatBuffer.from_root(place / "near")
    far = ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path)
    expected = near.batch(**OPTIONS)
    equal(expected, far.batch(**OPTIONS))
    one, two = mirrors_of(far)
    before = cache_contents(tmp_path)
    sizes = {mirror.path.name: (int(mirror.blocks.sizes.sum()),) * 2 for mirror in (one, two)}
    assert (before.path, before.bound, before.shards) == (tmp_path, None, sizes)
    assert before.num_bytes == sum(size for size, _ in sizes.values())
    (head,) = (tmp_path / "heads").iterdir()
    assert before.head_bytes == head.stat().st_size
    assert check_cache(tmp_path) == {}
    rot(two.path / "data" / "state.npy", slice(BLOCK, BLOCK + 1))
    rot(head, slice(0, 1))
    block = two.files.block["data/state.npy"]
    damaged = {two.path.name: block, f"heads/{head.name}": before.head_bytes}
    assert check_cache(tmp_path) == damaged
    assert (two.blocks.words[:, COUNTER] & 1).sum() == (two.blocks.words[:, LOCAL] == 0).sum() == 1
    assert cache_contents(tmp_path).num_bytes == before.num_bytes - block
    assert not (one.blocks.words[:, COUNTER] & 1).any()
    assert check_cache(tmp_path) == {}
    equal(expected, far.batch(**OPTIONS))
    equal(expected, ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path).batch(**OPTIONS))
    (two.path / "mirror" / "digests").unlink()
    assert check_cache(tmp_path) == {two.path.name: sizes[two.path.name][0]}  # which cannot be compared


@pytest.mark.parametrize("size", [None, 9])
def test_rotten_digests_are_replaced_by_those_that_are_fetched(place: Path, tmp_path: Path, size: int | None) -> None:
    """Else each process would fetch them, and a check would drop all blocks."""
    ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path).sample(1, seed=0, **OPTIONS)
    (path,) = tmp_path.glob("*/mirror/digests")
    published = path.read_bytes()
    if size is None:
        rot(path, slice(0, len(published)))
    else:
        os.truncate(path, size)
    equal(
        ConcatBuffer.from_root(place / "near").batch(**OPTIONS),
        ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path).batch(**OPTIONS),
    )
    assert path.read_bytes() == published
    assert [each.name for each in path.parent.iterdir() if each.name.startswith("digests")] == ["digests"]
    assert check_cache(tmp_path) == {}


def test_a_relative_path_is_that_of_the_moment_when_the_cache_was_given(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = ConcatBuffer.from_root(place / "near")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    far = ConcatBuffer.from_root(f"file://{place}/far", cache="cache")
    monkeypatch.chdir("there")
    equal(near.batch(**OPTIONS), far.batch(**OPTIONS))
    assert not any((tmp_path / "there").iterdir())


def test_a_cache_is_emptied_beside_readers(place: Path, tmp_path: Path) -> None:
    near = ConcatBuffer.from_root(place / "near")
    far = ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path, cache_bytes=24 * BLOCK)
    assert cache_contents(tmp_path).bound == 24 * BLOCK
    failed: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            seed = 0
            while not over.is_set():
                seed += 1
                equal(near.sample(8, seed=seed, **OPTIONS), far.sample(8, seed=seed, **OPTIONS))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        time.sleep(0.1)
        clear_cache(tmp_path)
    over.set()
    for thread in threads:
        thread.join()
    assert not failed
    equal(near.sample(8, seed=1, **OPTIONS), far.sample(8, seed=1, **OPTIONS))
    mirror = mirrors_of(far)[0]
    with open(mirror.path / "data" / "state.npy", "rb") as file:  # as a reader has it mapped
        used = os.fstat(file.fileno()).st_blocks
        assert clear_cache(tmp_path) > 0
        assert os.fstat(file.fileno()).st_blocks < used / 2
    contents = cache_contents(tmp_path)
    assert (contents.num_bytes, contents.head_bytes, contents.shards, contents.bound) == (0, 0, {}, 24 * BLOCK)
    assert int.from_bytes((tmp_path / "usage").read_bytes(), "little") == 0
    equal(near.sample(8, seed=1, **OPTIONS), far.sample(8, seed=1, **OPTIONS))
    assert check_cache(tmp_path) == {}


def test_digests_that_are_loaded_are_not_fetched_again_for_a_copy_that_is_made_anew(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = ConcatBuffer.from_root(f"file://{place}/far", cache=tmp_path)
    expected, asked, stream = far.sample(8, seed=1, **OPTIONS), list[str](), get_inside("stream_object")

    def told(objects: Any, ranges: Any, *others: Any) -> Any:
        asked.extend(path for path, *_ in ranges)
        return stream(objects, ranges, *others)

    clear_cache(tmp_path)
    set_inside(monkeypatch, stream_object=told)
    equal(expected, far.sample(8, seed=1, **OPTIONS))
    assert asked
    assert not [path for path in asked if path.endswith("blocks.npy")]
    assert check_cache(tmp_path) == {}


def test_only_a_cache_is_emptied_and_only_what_is_its_own(place: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"mine")
    for name in ("heads/policy.bin", "usage", "locks"):  # of another program; a published root has `heads`, too
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(b"mine")
    (tmp_path / "root").mkdir()
    for name in ("root.json", "bound"):
        (tmp_path / "root" / name).write_bytes(b"0")
    before = {
        path: path.read_bytes() for path in (*(tmp_path / "mine").rglob("*.bin"), *(place / "far").rglob("*.bin"))
    }
    for call in (cache_contents, check_cache, clear_cache):
        for other in (tmp_path / "mine", place / "far", place, tmp_path / "root"):
            with pytest.raises(NotABufferError, match="there is no cache of what was read by URLs"):
                call(other)
    assert {path: path.read_bytes() for path in before} == before
    far = ReplayBuffer.from_folder(f"file://{place}/far/shard-00000", cache=tmp_path)
    far.episode(0)
    names = [f"{'a' * 32}-{'b' * 32}.new-{age}" for age in ("young", "old")]
    for name in names:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / names[1], (time.time() - 90000,) * 2)
    (tmp_path / "heads").mkdir(exist_ok=True)
    (tmp_path / "heads" / "policy.bin").write_bytes(b"mine")
    killed = tmp_path / "heads" / f"{'a' * 32}.bin.{'b' * 16}"  # while it was written
    killed.write_bytes(b"half")
    assert check_cache(tmp_path) == {}
    clear_cache(tmp_path)
    assert not killed.exists()
    assert (tmp_path / "heads" / "policy.bin").read_bytes() == b"mine"
    assert (tmp_path / "mine" / "file").read_bytes() == b"mine"
    assert [(tmp_path / name).exists() for name in names] == [True, False]
