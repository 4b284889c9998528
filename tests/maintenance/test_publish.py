"""`publish` and `pull`: what comes back is what was packed; what was listed stays, whoever else publishes or dies."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fault_injection import system
from fsspec.implementations.local import LocalFileSystem
from inside import get_inside, root_with_shards, set_inside
from range_server import RangeServer

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    NotABufferError,
    RemoteError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    measure_store,
    pack,
    publish,
    pull,
    shards_at,
    verify,
)
from memmap_buffer.format.folder import Folder
from memmap_buffer.remote.layout import Root, Shard, digest, head_object, make_head, open_head, version_of
from memmap_buffer.remote.objects import Objects, Stored
from memmap_buffer.remote.published import Published, read_root, read_shard


class Plain(LocalFileSystem):
    """A store of which nothing is known but that it has objects: what two processes can share without a lock."""

    protocol = "plain"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("plain://"))


fsspec.register_implementation("plain", Plain, clobber=True)
STORES = ["memory", "plain", "file", "s3", "azure"]


class Killed(BaseException):
    """Nothing is done after it."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_inside(monkeypatch, first_pause=0.001, longest_pause=0.002)


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, new_root: Any) -> dict[str, Any]:
    """The URL and storage options of a new root, as arguments."""
    url, options = new_root(request.param)
    return {"url": url, "storage_options": options}


local = pytest.mark.parametrize("place", ["file"], indirect=True)
in_memory = pytest.mark.parametrize("place", ["memory"], indirect=True)
without_plain = pytest.mark.parametrize("place", ["memory", "file", "s3", "azure"], indirect=True)


def objects_of(place: dict[str, Any]) -> Objects:
    return Objects(place["url"], place["storage_options"])


def record(folder: Path, numbers: range = range(3)) -> Path:
    """A folder with these episodes."""
    with ReplayBuffer(folder, 9, 40, {"x": "int", "image": ("uint8", (64, 1024))}, {"name": "U4"}) as buffer:
        for number in numbers:
            steps = range(10 * number, 10 * number + 3 + 7 * number)
            images = np.broadcast_to(np.uint8(steps)[:, None, None], (len(steps), 64, 1024))
            buffer.store_episode(x=steps, image=images, name=f"e{number}")
    return folder


def extend(folder: Path, number: int = 1) -> Path:
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(x=[number], image=np.full((1, 64, 1024), number), name="new")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if path.name != ".lock"}


def packed(folder: Path) -> dict[str, bytes]:
    """The files of a folder's packed copy."""
    copy = folder.parent / f"{folder.name}.packed"
    shutil.rmtree(copy, ignore_errors=True)
    pack(folder, copy)
    found = files_of(copy)
    shutil.rmtree(copy)
    return found


def pulled(place: dict[str, Any], target: Path) -> dict[str, bytes]:
    shutil.rmtree(target, ignore_errors=True)
    pull(place["url"], target, storage_options=place["storage_options"])
    assert all(verify(path) == [] for path in target.iterdir())
    return files_of(target)


def under(name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}/{file}": data for file, data in files.items()}


def count_writes(monkeypatch: pytest.MonkeyPatch, fatal: int = -1) -> list[str]:
    """The paths that are written from now on; the write of this number, and each later one, is not done any more."""
    written: list[str] = []
    write, swap = get_inside("write_object"), get_inside("swap_object")

    def counted(function: Any) -> Any:
        def call(self: Objects, path: str, *rest: Any) -> Any:
            if len(written) == fatal:
                raise Killed
            written.append(path)
            return function(self, path, *rest)

        return call

    set_inside(monkeypatch, write_object=counted(write), swap_object=counted(swap))
    return written


# What stands there


def test_what_comes_back_is_what_was_packed(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = record(tmp_path / "one"), record(tmp_path / "two", range(2, 5))
    (one / "extra").mkdir()
    (one / "extra" / "note.txt").write_bytes(b"kept")
    assert publish(one, **place) == []
    assert publish(two, **place) == []
    assert pulled(place, tmp_path / "back") == under("one", packed(one)) | under("two", packed(two))
    with ReplayBuffer.from_folder(tmp_path / "back" / "two") as buffer:
        assert buffer.episode(1)["x"].tolist() == list(range(30, 54))
    listed = shards_at(**place)
    with ReplayBuffer.from_folder(two) as buffer:
        assert (listed["two"].episodes, listed["two"].steps) == (buffer.num_episodes, buffer.num_steps)
    assert {path.name for path in tmp_path.iterdir()} - {"url"} == {"back", "one", "two"}
    written = count_writes(monkeypatch)
    publish(one, **place)
    publish(two, **place)
    assert written == []
    assert shards_at(**place) == listed


@in_memory
def test_a_shard_is_read_by_its_own_url_too(place: dict[str, Any], tmp_path: Path) -> None:
    one = record(tmp_path / "one")
    publish(one, **place)
    own = {**place, "url": f"{place['url']}/one"}
    (shard,) = shards_at(**own).values()
    assert shard.is_head(objects_of(own).read(f"{shard.prefix()}head.bin", 1 << 20))
    pull(own["url"], tmp_path / "back", storage_options=own["storage_options"])
    assert files_of(tmp_path / "back") == packed(one)


@without_plain
def test_a_grown_folder_is_another_version_and_the_one_before_stays(place: dict[str, Any], tmp_path: Path) -> None:
    store, one = objects_of(place), record(tmp_path / "one")
    publish(one, **place)
    publish(record(tmp_path / "two", range(1)), **place)
    root = read_root(store)
    before, old = packed(one), root.shards["one"]
    publish(extend(one), **place)
    assert pulled(place, tmp_path / "back")["one/data/x.npy"] == packed(one)["data/x.npy"] != before["data/x.npy"]
    assert list(shards_at(**place)) == ["one", "two"]
    size = len(before["data/x.npy"])
    assert store.read_ranges([(f"{old.prefix('one')}data/x.npy", 0, size)]) == [before["data/x.npy"]]
    heads = store.read(head_object(old.head[0]), 1 << 20)  # of a reader that holds the list of before
    assert open_head(heads[old.head[1] : sum(old.head[1:])], "")["episodes.npy"] == before["episodes.npy"]


@in_memory
def test_a_version_of_before_can_be_published_again(place: dict[str, Any], tmp_path: Path) -> None:
    one = record(tmp_path / "one")
    first = packed(one)
    publish(one, **place)
    publish(extend(one), **place)
    with ReplayBuffer.from_folder(one) as buffer:
        buffer.delete(-1)
    shutil.rmtree(one)
    for name, data in first.items():
        (one / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_bytes(data)
    publish(one, **place)
    assert pulled(place, tmp_path / "back") == under("one", first)


@without_plain
def test_another_buffer_does_not_take_a_name(place: dict[str, Any], tmp_path: Path) -> None:
    publish(record(tmp_path / "one"), **place)
    listed = shards_at(**place)
    other = record(tmp_path / "elsewhere" / "one")
    with pytest.raises(SchemaMismatchError, match=r"/one has another buffer's episodes \(id .*\); rename the folder"):
        publish(other, **place)
    assert shards_at(**place) == listed


@without_plain
def test_other_fields_than_those_of_the_root_are_refused_before_anything_is_sent(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(record(tmp_path / "one"), **place)
    writes = count_writes(monkeypatch)
    with ReplayBuffer(tmp_path / "other", 9, 40, {"x": "float64", "image": ("uint8", (64, 1024))}) as buffer:
        buffer.store_episode(x=[1.0], image=np.zeros((1, 64, 1024)))
    with pytest.raises(SchemaMismatchError, match="has other fields than") as told:
        publish(tmp_path / "other", **place)
    assert writes == []
    lines = ["fields 'x': stored Field('int64', ()), given Field('float64', ())"]
    lines += ["meta_fields 'name': stored Field('U4', ()), given None"]
    assert told.value.differences == lines
    head, *rest = str(told.value).split("\n  ")
    assert head == f"{place['url']}/one has other fields than {tmp_path}/other, and a root is read as one:"
    assert "\n".join(rest) == "\n".join([*lines, "Publish to another root."])
    assert [*shards_at(**place)] == ["one"]


@local
def test_a_shard_alone_in_its_root_may_get_fields_and_other_sizes_and_codecs_are_no_other_fields(
    place: dict[str, Any], tmp_path: Path
) -> None:
    publish(record(tmp_path / "one"), **place)
    with ReplayBuffer.from_folder(tmp_path / "one") as buffer:
        buffer.add_field("y", ("int", (), 0))
    publish(tmp_path / "one", **place)
    fields = {"x": "int", "image": Field("uint8", (64, 1024), codec="zstd"), "y": ("int", (), 0)}
    with ReplayBuffer(tmp_path / "other", 3, 4, fields, {"name": "U4"}) as buffer:
        buffer.store_episode(x=[1], image=np.zeros((1, 64, 1024)), y=[2], name="a")
    publish(tmp_path / "other", **place)
    assert len(ConcatBuffer.from_root(place["url"], cache=tmp_path / "cache")) == 4


@local
def test_shards_of_other_fields_are_named_by_their_urls(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two first publishers at the same time may send them."""
    publish(record(tmp_path / "one"), **place)
    with ReplayBuffer(tmp_path / "other", 9, 40, {"x": "float"}) as buffer:
        buffer.store_episode(x=[1.0])
    publish(tmp_path / "other", url := f"{place['url']}-2")
    with monkeypatch.context() as patch:
        set_inside(patch, require_fields=lambda *_: None)  # neither has seen the other
        publish(tmp_path / "other", **place)
    with pytest.raises(SchemaMismatchError, match="have different fields") as told:
        ConcatBuffer.from_root(place["url"], cache=tmp_path / "cache")
    assert str(told.value).startswith(
        f"{place['url']}/other and {place['url']}/one have different fields:\n  fields 'x'"
    )
    one = ReplayBuffer.from_folder(f"{place['url']}/one", cache=tmp_path / "cache")
    other = ReplayBuffer.from_folder(f"{url}/other", cache=tmp_path / "cache")
    with pytest.raises(SchemaMismatchError, match=f"{url}/other and {place['url']}/one have different fields"):
        ConcatBuffer([one, other])


@local
def test_what_cannot_be_published_says_why(place: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="got the name 'a b', expected letters"):
        publish(record(tmp_path / "a b"), **place)
    with pytest.raises(SchemaError, match="got the name 'heads'"):
        publish(record(tmp_path / "heads"), **place)
    with pytest.raises(SchemaError, match="nothing can be published by this protocol"):
        publish(tmp_path / "a b" / ".." / "heads" / ".." / "one", "http://127.0.0.1:9/root")
    with pytest.raises(NotABufferError, match="there is no such folder"):
        publish(tmp_path / "nowhere", **place)
    if place["url"].startswith("file"):
        with pytest.raises(SchemaError, match="the root that it is in itself"):
            publish(record(tmp_path / "url" / "one"), **place)
    (record(tmp_path / "one") / "extra").mkdir()
    (tmp_path / "one" / "extra" / "my notes").write_bytes(b"")
    with pytest.raises(SchemaError, match="extra/my notes: got a name with more than letters"):
        publish(tmp_path / "one", **place)
    pack(tmp_path / "a b", tmp_path / "spoilt")
    with open(tmp_path / "spoilt" / "data" / "image.npy", "r+b") as file:
        file.seek(5000)
        file.write(b"?")
    with pytest.raises(CorruptBufferError, match="`repair` it, then publish it"):
        publish(tmp_path / "spoilt", **place)
    with pytest.raises(NotABufferError, match="nothing was published here"):
        shards_at(**place)


def test_a_bucket_that_is_not_there_is_named(tmp_path: Path, bucket: Any) -> None:
    _, options = bucket
    error = r"s3://no-such-bucket/root: there is no such bucket, or folder, to write to \(s3://.*\); make it, or check"
    with pytest.raises(RemoteError, match=error) as told:
        publish(record(tmp_path / "one"), "s3://no-such-bucket/root", storage_options=options)
    assert told.value.missing


RELATIVE = ["file://bucket/run7", "local://bucket", "simplecache::file://bucket", "file://./bucket"]


@pytest.mark.parametrize("url", [*RELATIVE, "ftp:/secret/x", "file:/data/bucket", "s3:/bucket/run7"])
def test_a_url_with_too_few_slashes_is_refused_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    folder = record(tmp_path / "one")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    error = "expected one, as in file:///data/run7" if url in RELATIVE else "expected two slashes, as in"

    def record_to(url: str) -> ReplayBuffer:
        return ReplayBuffer(tmp_path / "root", 9, 40, {"x": "int"}, shard="auto", publish_to=url)

    calls = [partial(publish, folder), shards_at, partial(pull, folder="back"), measure_store_briefly, record_to]
    if "://" in url:  # else they are paths
        calls += [ReplayBuffer.from_folder, ConcatBuffer.from_root]
    for call in calls:
        with pytest.raises(SchemaError, match=error) as told:
            call(url)
        assert "secret" not in str(told.value)
    assert [path.name for path in (tmp_path / "here").iterdir()] == []
    assert not (tmp_path / "root").exists()


def measure_store_briefly(url: str) -> Any:
    return measure_store(url, 0.01)


def test_a_path_and_an_absolute_url_are_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = record(tmp_path / "one")
    for place in (str(tmp_path / "a"), f"file://{tmp_path}/b", "file://~/c", f"local://{tmp_path}/d"):
        publish(folder, place)
        assert [*shards_at(place)] == ["one"]
    assert (tmp_path / "c" / "root.json").exists()


@local
def test_damaged_episodes_of_a_grid_are_left_out_and_named(place: dict[str, Any], tmp_path: Path) -> None:
    one = record(tmp_path / "one")
    with open(one / "data" / "image.npy", "r+b") as file:
        file.seek(200)
        file.write(b"?")
    assert publish(one, **place) == [0]
    assert shards_at(**place)["one"].episodes == 2


@in_memory
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_the_path_the_size_and_the_remedy(
    place: dict[str, Any], tmp_path: Path, error: int
) -> None:
    one = record(tmp_path / "one")
    copied = sum(3 + 7 * number for number in range(3)) * (8 + (64 << 10)) + 3 * 4 * 4
    with system(1, error=error, only=("pwrite",), lasting=True), pytest.raises(OSError, match="make room") as told:
        publish(one, **place)
    assert told.value.errno == error
    assert Path(told.value.filename).parent.name.startswith(".one.publish-")
    text = str(told.value)
    assert f"{os.strerror(error)}: {one} is packed into a copy here to be published, of {copied:,} bytes" in text
    assert "`published/`" in text
    assert "keep_published=n" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    publish(one, **place)
    with system(1, error=errno.EIO, only=("pwrite",)), pytest.raises(OSError, match="Input/output") as other:
        publish(extend(one), **place)
    assert other.value.errno == errno.EIO


# Others, and deaths


def publish_all(folders: list[Path], place: dict[str, Any], go: Any) -> None:
    go.wait()
    for folder in folders:
        publish(folder, **place)


@pytest.mark.parametrize("place", ["plain", "file", "s3", "azure"], indirect=True)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_publishers_at_the_same_time_lose_nothing(place: dict[str, Any], tmp_path: Path) -> None:
    names = [f"shard-{number:05}" for number in range(6)]
    for name in names:
        with ReplayBuffer(tmp_path / name, 2, 3, {"x": "int"}) as buffer:
            buffer.store_episode(x=[int(name[-1])])
    context = multiprocessing.get_context("fork")
    go = context.Barrier(3)
    folders = [[tmp_path / name for name in names[i::3]] for i in range(3)]
    children = [context.Process(target=publish_all, args=(some, place, go)) for some in folders]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0, 0, 0]
    back = pulled(place, tmp_path / "back")
    expected = [under(name, packed(tmp_path / name)) for name in names]
    assert back == {file: data for files in expected for file, data in files.items()}
    require_heads(objects_of(place))


def require_heads(store: Objects) -> None:
    """The head of each shard is where `root.json` says."""
    root = read_root(store)
    for name, shard in root.shards.items():
        key, first, size = shard.head
        (head,) = store.read_ranges([(head_object(key), first, first + size)])
        assert shard.is_head(head), name


@without_plain
def test_a_publisher_that_dies_before_any_write_leaves_what_was_listed_whole(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = record(tmp_path / "one", range(2)), record(tmp_path / "two", range(1))
    publish(one, **place)
    before = pulled(place, tmp_path / "back")
    extend(one)
    after = under("one", packed(one)) | under("two", packed(two))
    for fatal in itertools.count():
        with monkeypatch.context() as patch:
            written = count_writes(patch, fatal)
            with suppress(Killed):
                publish(one, **place)
                publish(two, **place)
                break
        del written
        found = pulled(place, tmp_path / "back")
        assert found in (before, under("one", packed(one))), fatal
    assert fatal > 4  # what was sent is not sent again
    assert pulled(place, tmp_path / "back") == after
    require_heads(objects_of(place))


@local
def test_the_packed_copy_that_a_dead_publisher_left_is_removed_and_that_of_a_living_one_is_not(
    place: dict[str, Any], tmp_path: Path
) -> None:
    one, dead, living = record(tmp_path / "one"), tmp_path / ".one.publish-1", tmp_path / ".one.publish-2"
    for left in (dead, living):
        pack(one, left / "packed")
    lock = Folder(living).lock()
    publish(one, **place)
    assert (dead.exists(), (living / "packed" / "schema.json").exists()) == (False, True)
    lock.release()


@local
def test_what_a_dead_publisher_sent_in_part_is_sent_again(place: dict[str, Any], tmp_path: Path) -> None:
    one = record(tmp_path / "one")
    publish(one, **place)
    shard = shards_at(**place)["one"]
    file = tmp_path / "url" / shard.prefix("one") / "data" / "image.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    (tmp_path / "url" / "one" / "shard.json").unlink()
    publish(one, **place)
    assert file.read_bytes() == whole


@in_memory
def test_an_entry_that_a_dead_publisher_left_is_listed_by_the_next(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = get_inside("write_object")

    def killed(objects: Objects, path: str, data: Any) -> None:
        if path.startswith("heads/"):  # after the entry
            raise Killed("before the list")
        write(objects, path, data)

    with monkeypatch.context() as patch, pytest.raises(Killed, match="before"):
        set_inside(patch, write_object=killed)
        publish(record(tmp_path / "one"), **place)
    with pytest.raises(NotABufferError, match="nothing was published here"):
        shards_at(**place)
    publish(record(tmp_path / "two"), **place)
    assert sorted(shards_at(**place)) == ["one", "two"]
    publish(extend(tmp_path / "one"), **place)
    assert len(objects_of(place).listing("entries")) == 2
    require_heads(objects_of(place))


@in_memory
def test_an_entry_that_a_newer_one_replaced_while_it_was_read_is_left_out(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(record(tmp_path / "one"), **place)
    stale = f"entries/{time.time_ns():020}.{'0' * 32}.one.json"
    listing, listed = get_inside("list_objects"), [True, True]  # by the store, the second time to be read

    def late(self: Objects, path: str) -> dict[str, Stored]:
        there = listing(self, path)
        return {**there, stale: Stored(1, None)} if path == "entries" and listed and listed.pop() else there

    publish(record(tmp_path / "two"), **place)
    set_inside(monkeypatch, list_objects=late)
    publish(extend(tmp_path / "two"), **place)
    assert not listed
    shards = shards_at(**place)
    assert {name: shard.episodes for name, shard in shards.items()} == {"one": 3, "two": 4}


@without_plain
def test_what_is_published_again_is_listed_though_the_clock_was_put_back(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(record(tmp_path / "one"), **place)
    now = time.time_ns()
    set_inside(monkeypatch, publish_clock=lambda: now - 10**12)
    with ReplayBuffer.from_folder(tmp_path / "one") as buffer:
        buffer.delete(0)
    publish(tmp_path / "one", **place)
    root = read_root(objects_of(place))
    assert root.shards["one"].episodes == 2


def test_a_folder_that_changes_while_it_is_sent_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, write = pack(record(tmp_path / "grid"), tmp_path / "one") or tmp_path / "one", get_inside("write_object")

    def meddle(self: Objects, path: str, data: Any) -> None:
        write(self, path, data)
        if isinstance(data, Path):
            data.write_bytes(data.read_bytes()[:-1] + b"?")

    set_inside(monkeypatch, write_object=meddle)
    with pytest.raises(CorruptBufferError, match="its files changed while they were sent; publish it again"):
        publish(one, f"file://{tmp_path}/url")
    assert not read_root(Objects(f"file://{tmp_path}/url")).shards


# Heads


def shard_of(head: bytes, name: str = "0" * 32) -> Shard:
    """What would be known of a shard with this head."""
    return Shard(name, 1, 1, 1, version_of(head, "0" * 32), (digest(head), 0, len(head)), "0" * 32)


@pytest.mark.parametrize("forged", ["cut", "header", "missing", "id", "large"])
def test_a_head_that_is_not_what_its_schema_says_is_refused_by_every_door(tmp_path: Path, forged: str) -> None:
    """All its digests are right."""
    publish(record(tmp_path / "one"), f"file://{tmp_path}/url")
    store = Objects(f"file://{tmp_path}/url/one")
    shard = read_shard(store)
    assert shard is not None
    files = open_head(Published(store, shard).read_head(), "")
    if forged == "cut":
        files["episodes.npy"] = files["episodes.npy"][:-64]
    elif forged == "header":
        files["meta/name.npy"] = b"?" + files["meta/name.npy"][1:]
    elif forged == "missing":
        del files["checksums.npy"]
    elif forged == "large":
        files["schema.json"] += b" " * get_inside("max_schema_bytes")
    head = make_head(files)
    version = version_of(head, shard.blocks)
    at = digest(head), 0, len(head)
    other = replace(shard, version=version, head=at, id="0" * 32 if forged == "id" else shard.id)
    store.write(f"{version}/head.bin", head)
    store.write("shard.json", other.to_json())
    for door in (
        lambda: pull(store.url, tmp_path / "back"),
        lambda: ReplayBuffer.from_folder(store.url, cache=tmp_path / "cache"),
    ):
        text = "/url/one has .* bytes, more than" if forged == "large" else "/url/one: the head is not what"
        with pytest.raises(CorruptBufferError, match=text):
            door()
    assert not (tmp_path / "back" / "schema.json").exists()


def test_a_head_that_no_reader_would_accept_is_never_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(record(tmp_path / "one"), f"file://{tmp_path}/url")
    set_inside(monkeypatch, max_head_bytes=(1 << 20) + 10_000)
    (record(tmp_path / "two") / "extra").mkdir()
    (tmp_path / "two" / "extra" / "large.json").write_bytes(bytes(10_000))
    with pytest.raises(SchemaError, match=r"meta fields and files in extra/ have .* bytes, expected at most 1,058,576"):
        publish(tmp_path / "two", f"file://{tmp_path}/url")
    assert [*shards_at(f"file://{tmp_path}/url")] == ["one"]


def test_the_heads_of_many_shards_are_a_few_objects_that_are_written_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, merged_heads=32)
    store, root, heads = Objects(f"memory://{tmp_path}"), Root(), dict[str, bytes]()
    written = count_writes(monkeypatch)
    sent = 0
    for number in range(300):
        name, head = f"shard-{number % 250:05}", f"{number} ".encode() * 20  # the last 50 are new versions
        shard = shard_of(head, f"{number % 250:032x}")
        root, heads[name] = root_with_shards(store, root, {name: (shard, head)}), head
        root = Root.from_json(root.to_json(), "here")
        sent += root.heads[root.shards[name].head[0]]
    assert list(root.shards) == list(heads)
    for name, shard in root.shards.items():
        key, first, size = shard.head
        assert store.read_ranges([(head_object(key), first, first + size)]) == [heads[name]]
        assert shard.is_head(heads[name])
    assert len(root.heads) < 2 * 250 / 32 + 6
    assert len(written) == 300
    assert sent < 7 * sum(map(len, heads.values()))
    set_inside(monkeypatch, merged_bytes=1)
    assert len(root_with_shards(store, root, {"big": (shard_of(b"head"), b"head")}).heads) == len(root.heads) + 1


# The way back


def fatal_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    stream, left = get_inside("stream_object"), [count]

    def broken(self: Objects, *arguments: Any) -> Iterator[tuple[int, bytes]]:
        for found in stream(self, *arguments):
            if not left[0]:
                raise Killed
            left[0] -= 1
            yield found

    set_inside(monkeypatch, stream_object=broken)


@local
def test_a_pull_that_dies_is_no_buffer_and_goes_on_where_it_was(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, target = record(tmp_path / "one"), tmp_path / "back" / "one"
    publish(one, **place)
    for count in range(50):
        with monkeypatch.context() as patch:
            fatal_after(patch, count)
            with suppress(Killed):
                pull(place["url"], tmp_path / "back")
                break
        assert not (target / "schema.json").exists()
    assert count < 5  # of each try, but the head and the digests, something is kept
    assert files_of(target) == packed(one)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*.npy")}
    pull(place["url"], tmp_path / "back")
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*.npy")} == before


@local
def test_what_is_wrong_in_a_pull_that_was_begun_is_fetched_again(place: dict[str, Any], tmp_path: Path) -> None:
    publish(record(tmp_path / "one"), **place)
    whole = pulled(place, tmp_path / "back")
    target = tmp_path / "back" / "one"
    (target / "schema.json").rename(target / "schema.json.new")
    (target / "meta" / "name.npy").write_bytes(b"")
    (target / "data" / "x.npy").write_bytes(b"")
    with open(target / "data" / "image.npy", "r+b") as file:
        file.seek(1 << 20)
        file.write(b"?")
    pull(place["url"], tmp_path / "back")
    assert files_of(tmp_path / "back") == whole


@local
def test_a_pull_of_another_version_than_was_begun_begins_anew(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, target = record(tmp_path / "one"), tmp_path / "back" / "one"
    publish(one, **place)
    pulled(place, tmp_path / "back")
    (target / "schema.json").rename(target / "schema.json.new")
    publish(extend(one), **place)
    pull(place["url"], tmp_path / "back")
    assert files_of(target) == packed(one)


@local
@pytest.mark.parametrize("name", ["state.npy", "data/x.npy", "data/image.npy"])
def test_a_file_that_is_not_ours_is_not_pulled_over(place: dict[str, Any], tmp_path: Path, name: str) -> None:
    publish(record(tmp_path / "one"), **place)
    mine = tmp_path / "back" / "one" / name
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"not ours")
    with pytest.raises(CorruptBufferError, match=f"{name} is in the way and is not ours to replace; move it away"):
        pull(place["url"], tmp_path / "back")
    assert mine.read_bytes() == b"not ours"
    mine.unlink()
    pull(place["url"], tmp_path / "back")
    assert verify(tmp_path / "back" / "one") == []


def test_wrong_and_broken_answers_are_no_part_of_a_pull(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    one = record(tmp_path / "one")
    publish(one, f"file://{tmp_path}/url")
    with RangeServer(tmp_path / "url") as server:
        for fault in ("wrong", "short", "cut", "reset", "500"):
            server.fail(fault, match="one/.*/head")
            server.fail(fault, match="image")
        pull(server.url, tmp_path / "back")
        assert files_of(tmp_path / "back" / "one") == packed(one)
        server.fail("wrong", 99, match="image")
        with pytest.raises(RemoteError, match=r"image\.npy: bytes .* another digest than those that were published"):
            pull(server.url, tmp_path / "again")
        with pytest.raises(NotABufferError, match="not a buffer"):
            ReplayBuffer.from_folder(tmp_path / "again" / "one")
        server.heal()
        pull(server.url, tmp_path / "again")
    assert files_of(tmp_path / "again" / "one") == packed(one)


@local
def test_a_folder_with_another_buffer_is_not_pulled_over(place: dict[str, Any], tmp_path: Path) -> None:
    publish(record(tmp_path / "one"), **place)
    mine = record(tmp_path / "back" / "one")
    before = files_of(mine)
    with pytest.raises(SchemaMismatchError, match="holds another buffer, or another version of this one"):
        pull(place["url"], tmp_path / "back")
    assert files_of(mine) == before
    with pytest.raises(NotABufferError, match=r"/x/root\.json: nothing was published here"):
        pull(f"{place['url']}/x", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@local
def test_a_root_is_not_pulled_into_a_buffer(place: dict[str, Any], tmp_path: Path) -> None:
    publish(record(tmp_path / "one"), **place)
    mine = record(tmp_path / "mine")
    before = files_of(mine)
    error = (
        rf"mine: got a folder that holds a buffer, expected one for the shards of the root {place['url']}, .*/url/one"
    )
    with pytest.raises(SchemaMismatchError, match=error):
        pull(place["url"], mine)
    assert files_of(mine) == before


# A stranger's lists


@local
@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"version":2', b'"version":3', "this release reads 1 and 2"),
        (b'"block":262144', b'"block":1048576', "blocks of 1048576 bytes; this release reads 1 and 2, 262144"),
        (b"memmap-buffer-root", b"something", "another program wrote it"),
        (b'"one"', b'"../one"', "no name that a shard may have"),
        (b'"one"', b'".."', "no name that a shard may have"),
        (b'"steps":', b'"steps":-', "does not tell of a shard as it should"),
        (b'"steps":', b'"strides":', "does not tell of a shard as it should"),
        (b'"id":"', b'"id":"?', "no 32 hexadecimal digits"),
        (b'"version":"', b'"version":"../', "no 32 hexadecimal digits"),
        (b"{", b"", "is no JSON"),
        (b":3}", b":%d}" % 2**40, "heads of 1099511627776 bytes, expected at most 2147483648"),
        (b",0,3]", b",0,%d]" % 2**40, "a head of 1099511627776 bytes, expected at most 2147483648"),
        (b",0,3]", b",1,3]", "its head lies behind the end"),
        (b'"heads"', b'"more":[' + b"[]," * 100_000 + b'[]],"heads"', "100014 values in 300351 bytes"),
    ],
)
def test_a_spoilt_list_is_an_error_that_says_where(
    place: dict[str, Any], tmp_path: Path, old: bytes, new: bytes, error: str
) -> None:
    store = objects_of(place)
    head = b"[]\n"
    shard = shard_of(head)
    data = Root().with_shards({"one": shard}, {digest(head): 3}).to_json()
    assert Root.from_json(data, "here").shards == {"one": shard}
    store.write("root.json", data.replace(old, new, 1))
    with pytest.raises((CorruptBufferError, SchemaError), match=rf"/url/root\.json.*{error}"):
        shards_at(**place)
    store.write("shard.json", shard.to_json())
    assert read_shard(store) == shard


def test_a_list_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(record(tmp_path / "one"), f"file://{tmp_path}/url")
    listed = (tmp_path / "url" / "root.json").read_bytes()
    set_inside(monkeypatch, max_root_bytes=len(listed))
    with pytest.raises(
        SchemaError, match=r"a list of 2 shards has \d+ bytes, expected at most .*; publish to another root"
    ):
        publish(record(tmp_path / "two"), f"file://{tmp_path}/url")
    assert (tmp_path / "url" / "root.json").read_bytes() == listed
