"""`collect_garbage`: what no list names goes, all else stays, wherever it is killed and whoever reads or publishes."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from inside import get_inside, set_inside, store_at

from memmap_buffer import (
    ConcatBuffer,
    NotABufferError,
    RemoteError,
    ReplayBuffer,
    SchemaError,
    collect_garbage,
    publish,
    pull,
    verify,
)

DAY = 86400.0
SUPERSEDED = f"entries/{1:020}"
REQUESTS = ("cat_file", "find", "info", "ls", "makedirs", "mv", "pipe_file", "put_file", "rm_file")


class Killed(BaseException):
    """Nothing is done after it."""


class Folder(LocalFileSystem):
    """A store of which nothing is known but that it has objects; it may be watched, and its facts be others."""

    protocol = "folder"
    before: Callable[[str], None] | None = None  # each request, by its name
    facts: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    inside = threading.local()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("folder://"))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        told = super().info(path, **options)
        return told if Folder.facts is None else Folder.facts(told)


def watched(name: str) -> Any:
    method = getattr(Folder, name)

    def call(self: Folder, *arguments: Any, **options: Any) -> Any:
        if getattr(Folder.inside, "call", False):  # one of another request
            return method(self, *arguments, **options)
        if Folder.before is not None:
            Folder.before(name)
        Folder.inside.call = True
        try:
            return method(self, *arguments, **options)
        finally:
            Folder.inside.call = False

    return call


for request_name in REQUESTS:
    setattr(Folder, request_name, watched(request_name))
fsspec.register_implementation("folder", Folder, clobber=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    set_inside(monkeypatch, first_pause=0.001, longest_pause=0.002, settle_seconds=0.0, root_look_seconds=-1.0)


def record(folder: Path, number: int) -> Path:
    with ReplayBuffer(folder, 9, 40, {"x": "int", "image": ("uint8", (4, 4))}) as buffer:
        buffer.store_episode(x=range(number), image=np.full((number, 4, 4), number))
    return folder


def extend(folder: Path, number: int) -> Path:
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(x=[number], image=np.full((1, 4, 4), number))
    return folder


def make(place: Path, url: str, options: dict[str, Any] | None = None) -> dict[str, int]:
    """A root with garbage of each kind; what of it is garbage. `place/first` is the oldest version of `one`."""
    store, versions = store_at(url, options), []
    publish(record(place / "two", 5), url, storage_options=options)
    record(place / "one", 3)
    shutil.copytree(place / "one", place / "first" / "one")
    for number in range(3):
        publish(extend(place / "one", number) if number else place / "one", url, storage_options=options)
        versions.append(get_inside("root_of")(store).shards["one"])
    if store.listing("entries"):
        store.write(f"{SUPERSEDED}.{versions[0].version}.one.json", versions[0].to_json())
    kept = {shard.prefix(name) for name, shard in get_inside("root_of")(store).shards.items()}
    for path in (f"two/{'a' * 32}/data/x.npy", f"two/{'a' * 32}/data/y.npy.17.new", "root.json.5.new"):
        store.write(path, b"half")
    for path in ("notes.txt", "heads/notes.txt", f"one/{'b' * 32}/notes.txt", "entries/notes.txt", "one/notes.new"):
        store.write(path, b"of another")
    # A run of another program, of which nothing says that it is ours; and one that has more than a version has.
    for path in (f"three/{'a' * 32}/data/train.csv", f"two/{'b' * 32}/data/x.npy", f"two/{'b' * 32}/notes.txt"):
        store.write(path, b"of another")
    heads = {get_inside("head_object")(key) for key in get_inside("root_of")(store).heads}
    waste: dict[str, int] = {}
    for path, stored in store.listing().items():
        version = "/".join(path.split("/")[:2])
        if path.endswith(("notes.txt", "notes.new")) or version.startswith((f"three/{'a' * 32}", f"two/{'b' * 32}")):
            continue
        if path.endswith(".new") or path.startswith(("entries/", "heads/")):
            waste |= {} if path in heads else {path: stored.size}
        elif "/data/" in path or path.endswith(("head.bin", "blocks.npy")):
            waste[version] = waste.get(version, 0) + (0 if f"{version}/" in kept else stored.size)
    return {path: size for path, size in waste.items() if size}


def make_old(folder: Path, days: float = 10.0) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - days * DAY,) * 2)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def contents(url: str, place: Path, options: dict[str, Any] | None = None) -> dict[str, bytes]:
    """All that is listed, pulled."""
    shutil.rmtree(place, ignore_errors=True)
    pull(url, place, storage_options=options)
    assert all(verify(path) == [] for path in place.iterdir())
    return files_of(place)


@pytest.fixture
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """(a folder with a root at `url`, all ten days old, what of it is garbage)."""
    place = tmp_path_factory.mktemp("template")
    waste = make(place, f"folder://{place}/url")
    make_old(place / "url")
    return place, waste


@pytest.mark.parametrize("kind", ["memory", "folder", "file", "s3", "azure"])
def test_what_no_list_names_is_removed_and_nothing_else(
    kind: str, tmp_path: Path, new_root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = new_root(kind)
    waste, store = make(tmp_path, url, options), store_at(url, options)
    assert len(waste) >= 8 + 3 * (kind in ("memory", "folder"))
    before, everything = contents(url, tmp_path / "back", options), store.listing()
    assert collect_garbage(url, storage_options=options) == {}
    later = time.time() + 8 * DAY
    set_inside(monkeypatch, store_clock=lambda: later)
    assert collect_garbage(url, storage_options=options, dry_run=True) == waste
    assert store.listing() == everything
    assert collect_garbage(url, storage_options=options) == waste
    assert collect_garbage(url, storage_options=options) == {}
    gone = {path for path in everything if any(f"{path}/".startswith(f"{each}/") for each in waste)}
    assert store.listing().keys() == everything.keys() - gone
    assert contents(url, tmp_path / "again", options) == before
    if kind == "file":
        left = {path.name for path in (tmp_path / "url" / "one").iterdir() if path.is_dir()}
        assert left == {get_inside("root_of")(store).shards["one"].version, "b" * 32}


PARTIAL = f"two/{'a' * 32}"
YOUNG = {  # what is young, and what of the garbage it keeps
    "one/shard.json": ("one/",),
    "one/*/blocks.npy": ("one/",),
    f"{PARTIAL}/data/x.npy": (f"{PARTIAL}*aaa",),
    f"{PARTIAL}/data/y.npy.17.new": (PARTIAL,),
    "heads/*": ("heads/", "one/", f"{PARTIAL}*aaa", "entries/01"),
    "entries/*": ("entries/", "one/V0"),
    f"{SUPERSEDED}*": ("entries/*one.json", "one/V0"),
    "root.json.5.new": ("root.json.5.new",),
}


@pytest.mark.parametrize("young", YOUNG)
def test_what_is_young_keeps_what_may_still_be_read_or_sent(template: tuple[Path, dict[str, int]], young: str) -> None:
    place, waste = template
    url, entry = f"folder://{place}/url", next(path for path in waste if path.startswith(SUPERSEDED))
    for path in (place / "url").glob(young):
        os.utime(path)
    oldest = f"one/{entry.split('.')[1]}"
    kept = set()
    for start in YOUNG[young]:
        start, _, end = start.replace("one/V0", oldest).partition("*")
        kept |= {path for path in waste if path.startswith(start) and path.endswith(end)}
    assert kept
    assert waste.keys() - collect_garbage(url).keys() == kept


def test_a_collector_that_dies_before_any_request_leaves_all_that_is_listed_and_the_next_goes_on(
    template: tuple[Path, dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kill, or a store that is gone from then on."""
    place, waste = template
    expected = contents(f"file://{place}/url", tmp_path / "back")
    lock, url = threading.Lock(), f"folder://{tmp_path}/url"
    for fatal in itertools.count():
        shutil.rmtree(tmp_path / "url", ignore_errors=True)
        shutil.copytree(place / "url", tmp_path / "url")
        made: list[str] = []

        def die(name: str, made: list[str] = made, fatal: int = fatal) -> None:
            with lock:
                if len(made) >= fatal:
                    raise (Killed, OSError)[fatal % 2]("no more")
                made.append(name)

        removed = None
        with monkeypatch.context() as patch, suppress(Killed, RemoteError):
            patch.setattr(Folder, "before", staticmethod(die))
            removed = collect_garbage(url)
        assert contents(url, tmp_path / "back") == expected, fatal
        if removed is not None:
            break
        publish(record(tmp_path / "four", 2), url)  # which lists what entries say
        assert contents(url, tmp_path / "back").items() > expected.items(), fatal
        shutil.rmtree(tmp_path / "four")
        make_old(tmp_path / "url")
        collect_garbage(url)
        assert not [path for path in waste if (tmp_path / "url" / path).is_file()], fatal
    assert fatal > 30
    assert removed == waste


def test_a_version_that_is_published_again_while_it_is_collected_is_whole(
    template: tuple[Path, dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher begins while any request of a collector is on its way, which has come to its end once it settled."""
    place, _ = template
    publish(place / "first" / "one", f"file://{tmp_path}/expected")
    expected = contents(f"file://{tmp_path}/expected", tmp_path / "back")
    set_inside(monkeypatch, removed_together=1)
    for meeting in itertools.count():
        shutil.rmtree(tmp_path / "url", ignore_errors=True)
        shutil.copytree(place / "url", tmp_path / "url")
        made: list[str] = []
        settled, ended = threading.Event(), threading.Event()

        def work(settled: threading.Event = settled) -> None:
            publish(place / "first" / "one", f"file://{tmp_path}/url")
            settled.set()

        publisher = threading.Thread(target=work)

        def meet(
            name: str, made: list[str] = made, meeting: int = meeting, both: Any = (publisher, settled, ended)
        ) -> None:
            publisher, settled, ended = both
            made.append(name)
            if len(made) - 1 == meeting:
                publisher.start()
                settled.wait(60)
            elif len(made) - 1 > meeting:
                ended.set()

        with monkeypatch.context() as patch:
            set_inside(patch, settle=lambda both=(settled, ended): both[0].set() or both[1].wait(60))
            patch.setattr(Folder, "before", staticmethod(meet))
            collect_garbage(f"folder://{tmp_path}/url")
            ended.set()
        if publisher.ident is None:
            break
        publisher.join()
        back = contents(f"file://{tmp_path}/url", tmp_path / "back")
        assert {path: data for path, data in back.items() if path.startswith("one/")} == expected, meeting
    assert meeting > 30


def test_a_reader_whose_head_object_is_gone_reads_the_list_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, lists = f"file://{tmp_path}/url", []
    publish(record(tmp_path / "one", 3), url)

    def read(objects: Any) -> Any:
        root = get_inside("root_of")(objects)
        lists.append(len(root.shards))
        if len(lists) == 1:  # what it names is replaced, and collected, before it is read
            publish(record(tmp_path / "two", 4), url)
            make_old(tmp_path / "url")
            assert [*collect_garbage(url)] == [get_inside("head_object")(next(iter(root.heads)))]
        return root

    set_inside(monkeypatch, read_root=read)
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    assert sorted(far.batch(timestep_level=True)["x"].tolist()) == [0, 0, 1, 1, 2, 2, 3]
    assert lists[:2] == [1, 2]


def test_heads_that_are_gone_are_read_one_by_one_by_readers_and_publishers(tmp_path: Path) -> None:
    url, store = f"file://{tmp_path}/url", store_at(f"file://{tmp_path}/url")
    for number, name in enumerate(("one", "two", "three", "four")):
        publish(record(tmp_path / name, 3), url)
        if number == 1:
            store.remove(get_inside("head_object")(get_inside("root_of")(store).shards["two"].head[0]))
            assert len(ConcatBuffer.from_root(url, cache=tmp_path / "cache")) == 2
    root = get_inside("root_of")(store)
    (head,) = root.heads  # put together of all
    assert store.size(get_inside("head_object")(head)) == root.heads[head]
    store.remove(get_inside("head_object")(head))
    store.remove(f"{root.shards['one'].prefix('one')}head.bin")
    with pytest.raises(RemoteError, match=r"head\.bin: .*there is none"):
        ConcatBuffer.from_root(url, cache=tmp_path / "other")


@pytest.mark.parametrize(("hours", "is_sent"), [(11, False), (13, True)])
def test_a_publisher_sends_again_what_was_left_there_half_a_day_ago_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float, is_sent: bool
) -> None:
    url, waits = f"file://{tmp_path}/url", []
    publish(record(tmp_path / "one", 3), url)
    (tmp_path / "url" / "one" / "shard.json").unlink()
    make_old(tmp_path / "url", hours / 24)
    old = next((tmp_path / "url").glob("one/*/data/x.npy"))
    set_inside(monkeypatch, settle=lambda: waits.append(old.stat().st_mtime))
    publish(tmp_path / "one", url)
    assert len(waits) == is_sent
    assert (time.time() - old.stat().st_mtime < 3600) == is_sent
    assert get_inside("shard_of")(store_at(url), "one/shard.json") is not None


def test_what_is_removed_before_a_shard_is_listed_is_sent_again_then_and_by_the_next_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, write = f"file://{tmp_path}/url", get_inside("write_object")

    def remove_one(self: Any, path: str, data: Any) -> None:
        write(self, path, data)
        if path == "root.json":
            next((tmp_path / "url").glob("one/*/data/x.npy")).unlink()

    with monkeypatch.context() as patch:
        set_inside(patch, write_object=remove_one)
        publish(record(tmp_path / "one", 3), url)
    expected = contents(url, tmp_path / "back")
    next((tmp_path / "url").glob("one/*/blocks.npy")).unlink()
    publish(tmp_path / "one", url)
    assert contents(url, tmp_path / "back") == expected


@pytest.mark.parametrize("file", ["data/x.npy", "blocks.npy", "head.bin"])
def test_a_publisher_that_sleeps_for_days_while_it_sends_lists_nothing_that_was_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    url, write, gone = f"file://{tmp_path}/url", get_inside("write_object"), []
    publish(record(tmp_path / "one", 3), url)
    publish(record(tmp_path / "two", 5), url)

    def sleep(self: Any, path: str, data: Any) -> None:
        write(self, path, data)
        if path.startswith("two/") and path.endswith(file) and not gone:
            make_old(tmp_path / "url", 2)
            gone.extend(collect_garbage(url, older_than=timedelta(days=1)))
        if path == "root.json":
            raise Killed("before it looks once more")

    set_inside(monkeypatch, write_object=sleep)
    with pytest.raises(Killed, match="looks once more"):
        publish(extend(tmp_path / "two", 7), url)
    assert gone
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    assert [len(far[i]["x"]) for i in range(len(far))] == [3, 5, 1]


TIMES: list[tuple[str, Any]] = [
    ("LastModified", lambda seconds: datetime.fromtimestamp(seconds, timezone.utc)),
    ("mtime", lambda seconds: seconds),
    ("created", int),
    ("last_modified", lambda seconds: datetime.fromtimestamp(seconds, timezone(timedelta(hours=5)))),
    ("updated", lambda seconds: datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")),
    ("mtime", lambda seconds: datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None)),
]


@pytest.mark.parametrize("number", range(len(TIMES)))
def test_the_age_is_what_the_store_tells(
    template: tuple[Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    place, waste = template
    name, of_seconds = TIMES[number]

    def facts(told: dict[str, Any]) -> dict[str, Any]:
        return {key: told[key] for key in ("name", "size", "type")} | {name: of_seconds(told["mtime"])}

    monkeypatch.setattr(Folder, "facts", staticmethod(facts))
    url = f"folder://{place}/url"
    assert collect_garbage(url, older_than=timedelta(days=10, minutes=10), dry_run=True) == {}
    assert collect_garbage(url, older_than=timedelta(days=10, minutes=-10), dry_run=True) == waste


@pytest.mark.parametrize("told", [{}, {"mtime": "yesterday"}], ids=["nothing", "no time"])
def test_a_store_that_does_not_tell_when_is_refused(
    template: tuple[Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]
) -> None:
    place, _ = template
    before = files_of(place / "url")
    monkeypatch.setattr(
        Folder, "facts", staticmethod(lambda facts: {key: facts[key] for key in ("name", "size", "type")} | told)
    )
    with pytest.raises(SchemaError, match="the store does not tell when this was written"):
        collect_garbage(f"folder://{place}/url")
    publish(place / "two", f"folder://{place}/url")  # as ever
    assert before.items() <= files_of(place / "url").items()


def test_what_cannot_be_collected_says_why(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/url"
    for age in (timedelta(hours=23), 7, "7d"):
        with pytest.raises(SchemaError, match=r"older_than: got .*, expected a timedelta of 1 day, 0:00:00 at least"):
            collect_garbage(url, older_than=age)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="nothing can be removed by this protocol"):
        collect_garbage("http://127.0.0.1:9/root")
    with pytest.raises(NotABufferError, match=r"root\.json: nothing was published here"):
        collect_garbage(url)
    publish(record(tmp_path / "one", 3), url)
    with pytest.raises(NotABufferError, match=r"root\.json: nothing was published here"):
        collect_garbage(f"{url}/one")


def test_what_a_link_leads_to_stays(template: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    place, waste = template
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.npy").write_bytes(b"mine")
    make_old(tmp_path)
    (place / "url" / "one" / ("c" * 32)).symlink_to(tmp_path)
    assert collect_garbage(f"file://{place}/url") == waste
    assert (tmp_path / "data" / "x.npy").read_bytes() == b"mine"
