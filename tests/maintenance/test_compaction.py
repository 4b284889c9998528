"""`compact`: joined shards have what their parts had, wherever it is killed and whoever reads or publishes."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import before_requests, folders_of, get_inside, set_inside, store_at

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    NotABufferError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    StaleEpisodeError,
    collect_garbage,
    compact,
    pack,
    publish,
    pull,
    shards_at,
    verify,
)

FIELDS: dict[str, Any] = {
    "x": Field("int", final=True),
    "text": ("U8", ()),
    "image": Field("uint8", (4, 4), codec="zstd"),
    "boxes": Field("float", (None, 2)),
    "terminated": "bool",
}
SHARDS = 3


class Killed(BaseException):
    """Nothing is done after it."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    set_inside(monkeypatch, first_pause=0.001, longest_pause=0.002, settle_seconds=0.0, root_look_seconds=-1.0)


def record(folder: Path, first: int, count: int = 2, longest: int = 9) -> Path:
    """A folder of episodes whose steps are numbered from 100 times the number of the episode."""
    with ReplayBuffer(folder, 9, longest, FIELDS, meta_fields={"task": "int"}) as buffer:
        for number in range(first, first + count):
            length = 1 + number % 5
            boxes = [np.full((t % 3, 2), number) for t in range(length)]
            with buffer.one_episode(task=number) as episode:
                for t in range(length):
                    image = np.full((4, 4), (number + t) % 256)
                    episode.store(x=100 * number + t, text=f"{number}", image=image, boxes=boxes[t], terminated=False)
                if number % 2:
                    episode.final(x=-number)
        buffer.mark([int(buffer.serials[-1])], add=["good"], note=f"of {first}")
    return folder


def extend(folder: Path, task: int) -> None:
    """Record one more episode."""
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(x=[1], text=["new"], image=[np.zeros((4, 4))], boxes=[[]], terminated=[1], task=task)


def make(place: Path, url: str, options: dict[str, Any] | None = None, first: int = 0) -> None:
    for number in range(first, first + SHARDS):
        publish(record(place / f"shard-{number:05}", 10 * number), url, storage_options=options)


def episodes(url: str, place: Path, options: dict[str, Any] | None = None) -> dict[int, Any]:
    """All episodes that are listed and all that they have, by task; each once, and none damaged."""
    shutil.rmtree(place, ignore_errors=True)
    pull(url, place, storage_options=options)
    out: dict[int, Any] = {}
    for folder in sorted(place.iterdir()):
        assert verify(folder) == []
        with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
            marks = buffer.marks()
            for i, serial in enumerate(buffer.serials.tolist()):
                episode = {name: np.asarray(value).tolist() for name, value in buffer[i].items() if name != "boxes"}
                episode["boxes"] = [np.asarray(each).tolist() for each in buffer[i]["boxes"]]
                assert episode["task"] not in out
                out[episode["task"]] = episode, marks.get(serial)
    return out


def transitions(url: str, cache: Path, options: dict[str, Any]) -> list[list[int]]:
    """Each step with its successor."""
    batch = ConcatBuffer.from_root(url, cache=cache, storage_options=options).batch(
        n_steps=1, current_fields=("x",), next_fields=("x",)
    )
    return sorted(np.stack([batch["x"], batch["next_x"]], 1).tolist())


def tasks(buffer: ConcatBuffer) -> list[int]:
    """The tasks of all episodes, as a sample sees them."""
    buffer.sample(1, timestep_level=True)
    return sorted(np.asarray(buffer.episodes(fields=())["task"]).tolist())


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root at `url`, made of its other folders."""
    place = tmp_path_factory.mktemp("template")
    make(place, f"file://{place}/url")
    return place


@pytest.fixture
def url(template: Path, tmp_path: Path) -> str:
    shutil.copytree(template / "url", tmp_path / "url")
    return f"file://{tmp_path}/url"


@pytest.mark.parametrize("kind", ["file", "s3", "azure"])
def test_a_joined_shard_has_what_its_parts_had(kind: str, tmp_path: Path, new_root: Any) -> None:
    where, options = new_root(kind)
    make(tmp_path, where, options)
    expected = episodes(where, tmp_path / "back", options)
    assert len(expected) == 2 * SHARDS
    assert sum(mark is not None for _, mark in expected.values()) == SHARDS
    steps = transitions(where, tmp_path / "cache", options)
    assert len(steps) > sum(len(episode["x"]) - 1 for episode, _ in expected.values())  # some have a final observation
    parts = [f"shard-{number:05}" for number in range(SHARDS)]
    before = store_at(where, options).listing()
    planned = compact(where, storage_options=options, dry_run=True)
    assert store_at(where, options).listing() == before
    assert compact(where, storage_options=options) == planned
    assert list(planned.values()) == [parts]
    assert list(shards_at(where, storage_options=options)) == list(planned)
    assert episodes(where, tmp_path / "back", options) == expected
    assert transitions(where, tmp_path / "cache", options) == steps
    assert compact(where, storage_options=options) == {}
    joined = ConcatBuffer.from_root(where, storage_options=options, cache=tmp_path / "cache")
    assert joined.shards == (SHARDS,)
    index = joined.episodes(fields=(), return_indices=True)
    assert index["_index"].tolist() == [[SHARDS, serial] for serial in range(2 * SHARDS)]
    assert np.asarray(index["task"]).tolist() == sorted(expected)


def test_the_same_shards_give_the_same_bytes(template: Path, tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        shutil.copytree(template / "url", tmp_path / name)
        compact(f"file://{tmp_path}/{name}")
        made.append(
            {str(p.relative_to(tmp_path / name)): p.read_bytes() for p in (tmp_path / name).rglob("*.*") if p.is_file()}
        )
    assert made[0] == made[1]


def test_only_small_shards_of_a_kind_are_joined_up_to_the_bytes_that_were_told(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/url"
    publish(record(tmp_path / "one", 0), where)
    publish(record(tmp_path / "large", 10, count=9, longest=60), where)
    publish(record(tmp_path / "two", 20), where)
    pack(record(tmp_path / "raw", 30), tmp_path / "other", codec={"image": None})
    publish(tmp_path / "other", where)
    publish(record(tmp_path / "three", 40), where)
    (tmp_path / "three" / "extra" / "more.json").write_text("{}")
    publish(record(tmp_path / "four", 50), where)
    (record(tmp_path / "five", 60) / "extra" / "robot.json").write_text("{}")
    publish(tmp_path / "five", where)
    sizes = {name: shard.num_bytes for name, shard in shards_at(where).items()}
    most = max(size for name, size in sizes.items() if name != "large")
    assert sizes["large"] > most
    assert list(compact(where, max_bytes=2 * most, dry_run=True).values()) == [["one", "two"], ["three", "four"]]
    assert list(compact(where, max_bytes=2 * most - 2, dry_run=True).values())[:1] != [["one", "two", "three", "four"]]
    assert compact(where, max_bytes=min(sizes.values()), dry_run=True) == {}
    assert ["one", "large", "two", "three", "four"] in compact(where, dry_run=True).values()


def test_shards_are_joined_by_their_numbers(template: Path, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/url"
    for number in (1, 0, 2):
        publish(template / f"shard-{number:05}", where)
    before = ConcatBuffer.from_root(where, cache=tmp_path / "one").episodes(fields=())["task"]
    compact(where)
    after = ConcatBuffer.from_root(where, cache=tmp_path / "two").episodes(fields=())["task"]
    assert np.asarray(after).tolist() == np.asarray(before).tolist() == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("joined_files", 2 * 13),
        ("joined_slots", 4),
        ("joined_bytes", 4 * 9 * FIELDS["boxes"].blob_bytes),
        ("joined_files", 3 * 13),
    ],
)
def test_a_joined_shard_is_none_that_cannot_be_made(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    names = [f"shard-{number:05}" for number in range(SHARDS)]
    set_inside(monkeypatch, **{limit: value})
    assert list(compact(url, dry_run=True).values()) == [names[: 3 if value == 39 else 2]]


def test_a_shard_that_is_there_twice_is_not_joined_with_itself(url: str, template: Path, tmp_path: Path) -> None:
    shutil.copytree(template / "shard-00000", tmp_path / "twin")
    publish(tmp_path / "twin", url)
    assert list(compact(url, dry_run=True).values()) == [[f"shard-{number:05}" for number in range(SHARDS)]]


def test_shards_with_a_dictionary_stay_as_they_are(tmp_path: Path) -> None:
    where, rng = f"file://{tmp_path}/url", np.random.default_rng(0)
    words = rng.integers(0, 255, (8, 64), np.uint8)
    for name in ("one", "two"):
        with ReplayBuffer(tmp_path / f"{name}-raw", 2, 3000, {"x": ("uint8", (128,))}) as buffer:
            buffer.store_episode(x=words[rng.integers(0, 8, (3000, 2))].reshape(3000, 128))
        pack(tmp_path / f"{name}-raw", tmp_path / name, codec={"x": "zstd"})
        assert (tmp_path / name / "data" / "x.dictionary.npy").exists()
        publish(tmp_path / name, where)
    assert compact(where, dry_run=True) == {}


def test_killed_before_any_request_it_has_changed_nothing_or_all_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kill, or a store that is gone from then on; what was left is used, or removed when it is old."""
    where = f"file://{tmp_path}/url"
    for number in range(4):
        with ReplayBuffer(tmp_path / f"shard-{number:05}", 2, 3, {"x": "int"}) as buffer:
            buffer.store_episode(x=range(3 * number, 3 * number + 3))
        publish(tmp_path / f"shard-{number:05}", where)
    shutil.move(tmp_path / "url", tmp_path / "before")
    half = 2 * max(shard.num_bytes for shard in shards_at(f"file://{tmp_path}/before").values())

    def steps() -> list[int]:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        return sorted(ConcatBuffer.from_root(where, cache=tmp_path / "cache").batch(timestep_level=True)["x"].tolist())

    for fatal in itertools.count():
        shutil.rmtree(tmp_path / "url", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "url")
        made = itertools.count()

        def die(made: Any = made, fatal: int = fatal) -> None:
            if next(made) >= fatal:
                raise (Killed, OSError)[fatal % 2]("no more")

        done = None
        with monkeypatch.context() as patch, suppress(Killed, OSError):
            before_requests(patch, die)
            done = compact(where, max_bytes=half)
        assert steps() == [*range(12)], fatal
        if done is not None:
            break
        compact(where, max_bytes=half * (1 + fatal % 3))  # of other groups what was sent before is garbage
        make_old(tmp_path / "url")
        collect_garbage(where)
        assert steps() == [*range(12)], fatal
        left = {path.name for path in (tmp_path / "url").iterdir() if any(p.is_file() for p in path.rglob("*"))}
        assert left - {"heads"} == shards_at(where).keys(), fatal
    assert len(done) == 2
    assert fatal > 20


def test_a_reader_that_has_parts_open_goes_on_with_them_and_misses_nothing(url: str, tmp_path: Path) -> None:
    """Nor has it an episode twice, nor has a worker of it; who opens anew has the same episodes, and numbers."""
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    before = tasks(far)
    drawn = far.sample(64, timestep_level=True, return_indices=True, seed=0)
    make(tmp_path, url, first=SHARDS)  # which it has not seen
    compact(url)
    publish(record(tmp_path / "late", 900), url)
    worker = pickle.loads(pickle.dumps(folders_of(far)))
    every = sorted(episodes(url, tmp_path / "back"))
    assert len(every) == len(before) + 2 * SHARDS + 2
    assert tasks(far) == every
    assert {*range(2 * SHARDS)} < {*far.shards}
    compact(url)  # those that were joined before, too
    (joined,) = shards_at(url)
    publish(record(tmp_path / "later", 950), url)
    fresh = ConcatBuffer.from_root(url, cache=tmp_path / "other")
    assert tasks(far) == tasks(fresh) == [*every, 950, 951]
    assert len(fresh.shards) == 2
    assert set(fresh.shards).isdisjoint(range(2 * SHARDS))
    assert max(fresh.shards) == max(far.shards)  # of `later`
    assert joined not in [path.name for path in far.folders]
    again = far.batch(drawn["_indices"], timestep_level=True)
    np.testing.assert_array_equal(again["x"], drawn["x"])
    assert sum(map(len, worker.refresh())) == len(far)
    with pytest.raises(StaleEpisodeError, match=r"shard-0000\d: its episodes were joined with others into joined-"):
        fresh.batch(drawn["_indices"], timestep_level=True)
    make_old(tmp_path / "url")
    collect_garbage(url)
    np.testing.assert_array_equal(far.batch(drawn["_indices"], timestep_level=True)["x"], drawn["x"])  # from its cache
    with pytest.raises(NotABufferError, match="nothing was published here"):
        ReplayBuffer.from_folder(f"{url}/shard-00000", cache=tmp_path / "other")


def test_a_reader_that_has_a_part_open_reads_the_versions_that_were_joined(
    url: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the part that it has open, and of one that changed just before it was joined, which is refused."""
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    tasks(far)
    changed = tmp_path / "shard-00001"
    shutil.copytree(template / changed.name, changed)
    extend(changed, 99)
    publish(changed, url)
    publish(record(tmp_path / "shard-00007", 70), url)
    write, seen = get_inside("write_object"), list[list[int]]()
    extend(tmp_path / "shard-00007", 79)

    def written(self: Any, path: str, data: Any) -> None:
        write(self, path, data)
        if path == "shard-00007/shard.json":
            patch.undo()
            compact(url)
            seen.append(tasks(far))

    with monkeypatch.context() as patch:
        set_inside(patch, write_object=written)
        with pytest.raises(SchemaMismatchError, match="shard-00007: it was joined with others"):
            publish(tmp_path / "shard-00007", url)
    assert tasks(far) == tasks(ConcatBuffer.from_root(url, cache=tmp_path / "other"))
    assert {99, 70, 71} < {*tasks(far)}
    assert 99 in seen[0]
    assert 79 not in seen[0]


def test_the_state_of_an_epoch_is_taken_up_by_who_has_the_parts_and_refused_by_others(url: str, tmp_path: Path) -> None:
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    options = {"batch_size": 3, "timestep_level": True, "shuffle": True, "seed": 1, "fields": ("x",)}
    whole = [batch["x"].tolist() for batch in far.dataloader(**options)]
    loader = far.dataloader(**options)
    iterator = iter(loader)
    begun, state = [next(iterator)["x"].tolist() for _ in range(3)], loader.state_dict()
    compact(url)
    begun += [batch["x"].tolist() for batch in iterator]
    assert begun == whole
    resumed = far.dataloader(**options)
    resumed.load_state_dict(state)
    assert [batch["x"].tolist() for batch in resumed] == whole[3:]
    fresh = ConcatBuffer.from_root(url, cache=tmp_path / "cache").dataloader(**options)
    for on_stale in ("raise", "redraw"):
        with pytest.raises(StaleEpisodeError, match=r"shard-00000: its episodes were joined .* begin a new epoch"):
            fresh.load_state_dict(state, on_stale)


@pytest.mark.parametrize("kind", ["file", "s3", "azure"])
def test_what_is_published_before_any_of_its_writes_is_not_lost(
    kind: str, template: Path, tmp_path: Path, new_root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, options = new_root(kind)
    folders = sorted(template.glob("shard-*"))
    for turn in itertools.count():
        url, turns, publishers = f"{store}-{turn}", itertools.count(), list[threading.Thread]()
        for folder in folders[:2]:
            publish(folder, url, storage_options=options)
        made = real_write, real_replace = get_inside("write_object"), get_inside("swap_object")

        def meet(turns: Any = turns, turn: int = turn, url: str = url, publishers: Any = publishers) -> None:
            if not publishers and next(turns) == turn:
                work = functools.partial(publish, folders[2], url, storage_options=options)
                publishers.append(threading.Thread(target=work))
                publishers[0].start()
                publishers[0].join(1 if kind == "file" else 60)  # it may wait for the lock of the list

        def written(self: Any, *arguments: Any, made: Any = made, meet: Any = meet) -> None:
            meet()
            made[0](self, *arguments)

        def replaced(self: Any, *arguments: Any, made: Any = made, meet: Any = meet) -> bool:
            meet()
            return bool(made[1](self, *arguments))

        with monkeypatch.context() as patch:
            set_inside(patch, write_object=written, swap_object=replaced)
            (joined,) = compact(url, storage_options=options)
        assert (real_write, real_replace) == (get_inside("write_object"), get_inside("swap_object"))
        if not publishers:
            break
        publishers[0].join()
        assert shards_at(url, storage_options=options).keys() == {joined, folders[2].name}, turn
        assert len(episodes(url, tmp_path / "back", options)) == 6, turn
    assert turn > 10


def test_a_version_that_is_published_meanwhile_ends_it_and_stays(
    url: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = get_inside("write_object")
    shutil.copytree(template / "shard-00001", tmp_path / "shard-00001")

    def written(self: Any, path: str, data: Any) -> None:
        write(self, path, data)
        if path.startswith("joined-") and path.endswith("shard.json"):
            extend(tmp_path / "shard-00001", 99)
            publish(tmp_path / "shard-00001", url)

    with (
        monkeypatch.context() as patch,
        pytest.raises(SchemaMismatchError, match=r"shard-00001: .* by now, .*try again"),
    ):
        set_inside(patch, write_object=written)
        compact(url)
    assert len(episodes(url, tmp_path / "back")) == 2 * SHARDS + 1
    compact(url)
    assert len(episodes(url, tmp_path / "back")) == 2 * SHARDS + 1


def test_a_folder_whose_shard_was_joined_is_not_published_again(url: str, template: Path, tmp_path: Path) -> None:
    """As it is, by a recorder that was killed before it knew that it was: nothing is done; changed: it is refused."""
    compact(url)
    make_old(tmp_path / "url")
    collect_garbage(url)
    before = store_at(url).listing()
    shutil.copytree(template / "shard-00001", tmp_path / "shard-00001")
    assert publish(tmp_path / "shard-00001", url) == []
    assert store_at(url).listing() == before
    with ReplayBuffer.from_folder(tmp_path / "shard-00001") as buffer:
        buffer.delete(0)
    with pytest.raises(SchemaMismatchError, match=r"shard-00001: it was joined with others into joined-.* has changed"):
        publish(tmp_path / "shard-00001", url)
    assert store_at(url).listing() == before


def test_parts_are_collected_once_they_were_listed_as_joined_for_so_long(url: str, tmp_path: Path) -> None:
    most = max(shard.num_bytes for shard in shards_at(url).values())
    for i, name in enumerate(("a", "b", "c", "d")):  # which stay as they are, and their heads
        publish(record(tmp_path / name, 100 + 10 * i, count=9, longest=60), url)
    before = shards_at(url)
    make_old(tmp_path / "url")
    joined = [part for parts in compact(url, max_bytes=2 * most).values() for part in parts]
    assert len(joined) == 2
    versions = {f"{name}/{before[name].version}" for name in joined}
    assert versions.isdisjoint(collect_garbage(url))
    (tmp_path / "url" / joined[0] / "notes.txt").write_text("of another")
    make_old(tmp_path / "url")
    gone = {path for path in collect_garbage(url) if not path.startswith("heads/")}
    assert gone == versions | {f"{joined[1]}/shard.json"}  # not that beside what is of another
    assert collect_garbage(url) == {}
    assert len(episodes(url, tmp_path / "back")) == 2 * SHARDS + 4 * 9


@pytest.fixture
def killed_before_it_was_listed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A root at which all is old, with a joined shard of which only `root.json` does not tell."""

    write = get_inside("write_object")

    def written(self: Any, path: str, data: Any) -> None:
        if path == "root.json":
            raise Killed("before")
        write(self, path, data)

    with monkeypatch.context() as patch, pytest.raises(Killed, match="before"):
        set_inside(patch, write_object=written)
        compact(url)
    make_old(tmp_path / "url")
    return url


def test_a_collector_that_planned_before_removes_nothing_of_what_is_joined_meanwhile(
    killed_before_it_was_listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, remove, one_at_a_time = killed_before_it_was_listed, get_inside("remove_older_objects"), threading.Lock()
    planned = collect_garbage(url, dry_run=True)

    def late(self: Any, path: str, seconds: float) -> bool:
        with one_at_a_time:
            compact(url)  # before the first of them
        return remove(self, path, seconds)

    set_inside(monkeypatch, remove_older_objects=late)
    gone = collect_garbage(url)
    (joined,) = shards_at(url)
    assert f"{joined}/shard.json" in planned
    assert not [path for path in gone if path.startswith(joined)]
    assert len(episodes(url, tmp_path / "back")) == 2 * SHARDS
    assert [*shards_at(f"{url}/{joined}")] == [""]


def test_what_a_collector_is_about_to_remove_while_it_is_written_is_there_in_the_end(
    killed_before_it_was_listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that looked before something was written removes it before `settle` returns."""
    url, waits = killed_before_it_was_listed, itertools.count()
    (place,) = (tmp_path / "url").glob("joined-*")

    def remove() -> None:
        next(waits)
        for path in (*place.glob("*/head.bin"), *place.glob("*/data/*"), place / "shard.json"):
            path.unlink(missing_ok=True)

    set_inside(monkeypatch, settle=remove)
    compact(url)
    assert next(waits) == 2
    assert len(episodes(url, tmp_path / "back")) == 2 * SHARDS
    assert [*shards_at(f"{url}/{place.name}")] == [""]


def test_what_the_second_of_two_collectors_removes_late_is_there_in_the_end(
    killed_before_it_was_listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked at the old objects; the first has removed them, and the second removes each new one once."""
    url, write, removed = killed_before_it_was_listed, get_inside("write_object"), set[str]()
    collect_garbage(url)
    assert not [*(tmp_path / "url").glob("joined-*/shard.json")]

    def late(self: Any, path: str, data: Any) -> None:
        write(self, path, data)
        if path.startswith("joined-") and path not in removed:
            removed.add(path)
            (tmp_path / "url" / path).unlink()

    set_inside(monkeypatch, write_object=late)
    compact(url)
    (joined,) = shards_at(url)
    assert f"{joined}/shard.json" in removed
    assert len(episodes(url, tmp_path / "back")) == 2 * SHARDS
    assert [*shards_at(f"{url}/{joined}")] == [""]


def test_a_copy_of_a_root_is_read_whole_and_none_of_before_is_mixed_with_it(url: str, tmp_path: Path) -> None:
    pull(url, tmp_path / "before")
    publish(record(tmp_path / "shard-00007", 100, count=9, longest=60), url)
    (joined,) = compact(url, max_bytes=2 * max(shard.num_bytes for shard in list(shards_at(url).values())[:SHARDS]))
    pull(url, tmp_path / "back")
    pull(url, tmp_path / "back")  # again: nothing is done
    copy = ConcatBuffer.from_root(tmp_path / "back")
    assert {folder.name for folder in copy.folders} == {*shards_at(url)} > {joined}
    assert tasks(copy) == tasks(ConcatBuffer.from_root(url, cache=tmp_path / "cache"))
    assert [folder.name for folder in get_inside("shards_of")(tmp_path / "back")] == sorted(shards_at(url))
    parts = sorted(path.name for path in (tmp_path / "before").iterdir())
    with pytest.raises(
        SchemaMismatchError, match=rf"before/shard-0000\d: its episodes are in {joined} .*new folder, or"
    ):
        pull(url, tmp_path / "before")
    assert sorted(path.name for path in (tmp_path / "before").iterdir()) == parts


def test_what_cannot_be_joined_says_why(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"memory://\S+: this store cannot replace the list of shards only if"):
        compact(f"memory://{tmp_path}")
    with pytest.raises(SchemaError, match=r"http://\S+: this store cannot replace"):
        compact("http://127.0.0.1:9/root")
    with pytest.raises(NotABufferError, match=r"root\.json: nothing was published here"):
        compact(f"file://{tmp_path}/url")
    with pytest.raises(SchemaError, match="max_bytes: got 0"):
        publish(record(tmp_path / "one", 0), f"file://{tmp_path}/url")
        compact(f"file://{tmp_path}/url", max_bytes=0)


@pytest.mark.parametrize(
    ("key", "value"), [("joined", "shard-00000"), ("joined", "elsewhere"), ("version", "../.."), ("joined", 7)]
)
def test_a_list_that_tells_of_no_shard_behind_is_damaged(url: str, tmp_path: Path, key: str, value: Any) -> None:
    compact(url)
    path = tmp_path / "url" / "root.json"
    document = json.loads(path.read_text())
    document["shards"]["shard-00001"][key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptBufferError, match=r"root\.json: shard 'shard-00001' was joined into"):
        shards_at(url)


def make_old(folder: Path, days: float = 10.0) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - days * 86400,) * 2)
