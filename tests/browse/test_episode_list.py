"""The table of episodes that a page shows: it follows writer and marks, is filtered, sorted and cut into pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import ConcatBuffer, CorruptBufferError, ReplayBuffer, SchemaError
from memmap_buffer.browse import episode_list
from memmap_buffer.browse.checks import Checks
from memmap_buffer.browse.episode_list import EpisodeList

FIELDS = {
    "observation": ("float32", 3),
    "action": "float32",
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
}


def store(buffer: ReplayBuffer, number: int, **odd: Any) -> None:
    steps = 3 + number % 4
    ends = np.arange(steps) == steps - 1
    rows = {"observation": np.arange(3.0 * steps).reshape(steps, 3), "action": np.arange(steps)}
    rows |= {"reward": np.full(steps, number), "terminated": ends & (number % 2 == 0), "truncated": ends}
    buffer.store_episode(**{**rows, "task": number % 3, "who": f"robot {number % 2}", **odd})


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    meta = {"task": "int", "who": "U16"}
    with ReplayBuffer(tmp_path / "data", 12, 8, FIELDS, meta_fields=meta, circular=True) as buffer:
        for number in range(10):
            store(buffer, number)
        yield buffer


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EpisodeList]]:
    monkeypatch.setattr(episode_list, "LOOK_SECONDS", 0.01)
    made: list[EpisodeList] = []

    def make(*given: Any, **options: Any) -> EpisodeList:
        made.append(EpisodeList(*given, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_returns_and_ends_are_added_to_what_is_there_at_once(
    buffer: ReplayBuffer, listed: Callable[..., EpisodeList]
) -> None:
    episodes = listed(buffer)
    assert episodes.columns["length"].tolist() == [3 + n % 4 for n in range(10)]
    wait(lambda: episodes.progress == 1)
    assert episodes.columns["return"].tolist() == [n * (3 + n % 4) for n in range(10)]
    assert episodes.columns["end"].tolist() == ["terminated" if n % 2 == 0 else "truncated" for n in range(10)]


def test_it_follows_what_is_published_and_removed(buffer: ReplayBuffer, listed: Callable[..., EpisodeList]) -> None:
    episodes = listed(buffer)
    wait(lambda: episodes.progress == 1)
    version = episodes.version
    for number in range(10, 15):
        store(buffer, number)
    buffer.delete([1])
    wait(lambda: episodes.columns["serial"].tolist() == [3, *range(5, 15)] and episodes.progress == 1)
    assert episodes.columns["return"].tolist() == [n * (3 + n % 4) for n in (3, *range(5, 15))]
    assert episodes.version > version


def test_pages_are_filtered_sorted_and_told_whole(buffer: ReplayBuffer, listed: Callable[..., EpisodeList]) -> None:
    episodes = listed(buffer, marks="")
    wait(lambda: episodes.progress == 1)
    buffer.mark([2, 4], add=["bad", "slip"])
    buffer.mark([4], note="<b>")
    episodes.look_again()
    page = episodes.page([], "return", True, 1, 3)
    assert [row["_id"] for row in page["data"]] == ["7", "9", "6"]
    assert (page["last_page"], page["last_row"], page["total"]) == (4, 10, 10)
    rows = episodes.page(["mark=bad", "note!="], None, False, 1, 5)["data"]
    assert [(row["_id"], row["mark"], row["note"], row["who"]) for row in rows] == [
        ("4", ("bad", "slip"), "<b>", "robot 0")
    ]
    assert [row["_id"] for row in episodes.page(["mark=", "task=1"], "serial", False, 1, 9)["data"]] == ["1", "7"]
    assert [row["_id"] for row in episodes.page(["mark!=slip", "task=2"], None, False, 1, 9)["data"]] == ["8", "5"]
    assert episodes.page([], None, False, 99, 9)["data"] == []


@pytest.mark.parametrize("where", ["task>", "what=3", "task=x", "mark<bad", "who<"])
def test_a_condition_that_cannot_be_meant_is_refused(
    buffer: ReplayBuffer, listed: Callable[..., EpisodeList], where: str
) -> None:
    episodes = listed(buffer, marks="")
    if where == "who<":
        assert episodes.rows([where])["serial"].tolist() == []
        return
    with pytest.raises(SchemaError, match="--where"):
        episodes.rows([where])


def test_histograms_are_of_the_episodes_that_are_left(buffer: ReplayBuffer, listed: Callable[..., EpisodeList]) -> None:
    episodes = listed(buffer)
    counts, edges = episodes.histograms()["length"]
    assert (sum(counts), edges[0], edges[-1]) == (10, 3, 7)  # each part is one length
    assert sum(episodes.histograms(["task=0"])["length"][0]) == 4
    assert "serial" not in episodes.histograms()


def test_a_column_of_huge_numbers_hides_no_histogram_and_is_told_to_its_last_digit(
    tmp_path: Path, listed: Callable[..., EpisodeList]
) -> None:
    meta = {"huge": "float64", "stamp": "int64"}
    with ReplayBuffer(tmp_path / "huge", 4, 5, {"x": "float32"}, meta_fields=meta) as buffer:
        for number in (1, 2):
            buffer.store_episode(x=[0] * number, huge=[1e308, -1e308][number % 2], stamp=2**60 + 257 * number)
        episodes = listed(buffer)
        assert set(episodes.histograms()) == {"length", "stamp"}
        page = episodes.page([], "stamp", False, 1, 9)["data"]
        assert [(row["stamp"], row["length"]) for row in page] == [(str(2**60 + 257), 1), (str(2**60 + 514), 2)]


def test_episodes_of_a_root_are_named_by_shard_and_serial(tmp_path: Path, listed: Callable[..., EpisodeList]) -> None:
    for shard in range(2):
        with ReplayBuffer(
            tmp_path / f"shard-0000{shard}", 4, 8, FIELDS, meta_fields={"task": "int", "who": "U16"}
        ) as b:
            for number in range(3):
                store(b, number + shard)
    episodes = listed(ConcatBuffer.from_root(tmp_path), marks="")
    wait(lambda: episodes.progress == 1)
    rows = episodes.page([], "return", False, 1, 9)["data"]
    assert [row["_id"] for row in rows] == ["0-0", "0-1", "1-0", "0-2", "1-1", "1-2"]
    assert [row["return"] for row in rows] == [0, 4, 4, 10, 10, 18]
    assert episodes.name_of("1-2") == (1, 2)
    episodes.buffer.mark([[1, 2]], add=["good"])
    episodes.look_again()
    assert episodes.rows(["mark=good"])["shard"].tolist() == [1]


@pytest.mark.parametrize("text", ["", "x", "1-2", "-1", "1" * 30, "٣x", "../schema.json"])
def test_what_names_no_episode_is_refused(buffer: ReplayBuffer, listed: Callable[..., EpisodeList], text: str) -> None:
    with pytest.raises(SchemaError, match="expected its number"):
        listed(buffer).name_of(text)


def test_checks_find_what_is_no_number_and_what_never_changes(
    buffer: ReplayBuffer, listed: Callable[..., EpisodeList]
) -> None:
    store(buffer, 10, observation=[[1.0, np.nan, 0], [1, 1, 0], [1, 2, 0], [1, 1, 0], [0, 1, 0]])
    store(buffer, 11, action=np.full(6, 0.5))
    episodes = listed(buffer)
    checks = Checks(episodes, ["observation", "action"])
    wait(lambda: checks.report()["done"])
    report = checks.report()
    assert report["odd"] == {"nan": {"observation": 1, "action": 0}, "constant": {"observation": 0, "action": 1}}
    assert episodes.rows(["nan=observation"])["serial"].tolist() == [10]
    assert episodes.rows(["constant=action"])["serial"].tolist() == [11]
    assert [row["entry"] for row in report["rows"]] == ["observation[0]", "observation[1]", "observation[2]", "action"]
    store(buffer, 12, observation=np.full((3, 3), np.nan))
    wait(lambda: 12 in episodes.columns["serial"])
    assert episodes.rows(["serial=12"])["nan"].tolist() == [()]
    assert checks.report()["checked"] == checks.report()["total"] - 1
    wait(lambda: checks.report()["done"])
    assert episodes.rows(["nan=observation"])["serial"].tolist() == [12, 10]
    checks.close()


def test_an_open_episode_that_grows_costs_nothing_and_is_whole_at_its_end(
    tmp_path: Path, listed: Callable[..., EpisodeList], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_list, "LOOK_SECONDS", 0.2)
    with ReplayBuffer(tmp_path / "open", 4, 500, {"reward": "float32"}, publish="step") as buffer:
        with buffer.one_episode():
            buffer.store(reward=1)
            episodes = listed(buffer)
            begun, version = time.monotonic(), episodes.version
            while time.monotonic() < begun + 1:
                buffer.store(reward=1) if buffer.num_steps < 400 else None
            assert episodes.version - version < 40
        wait(lambda: episodes.columns["return"].tolist() == [buffer.num_steps])


def test_after_a_look_that_failed_no_mark_stands_at_another_episode(
    tmp_path: Path, listed: Callable[..., EpisodeList]
) -> None:
    with ReplayBuffer(tmp_path / "ring", 4, 5, {"reward": "float32"}, circular=True) as buffer:
        for number in range(4):
            buffer.store_episode(reward=[number])
        buffer.mark([3], add=["bad"])
        episodes = listed(buffer, marks="")
        file = buffer.folder / "extra" / "marks.json"
        whole = file.read_bytes()
        file.write_bytes(b"{")
        for number in (4, 5):
            buffer.store_episode(reward=[number])
        for _ in range(3):
            with pytest.raises(CorruptBufferError, match="no marks that can be read"):
                episodes.look_again()
            with pytest.raises(CorruptBufferError, match="no marks that can be read"):
                episodes.rows(["mark=bad"])
        file.write_bytes(whole)
        wait(lambda: episodes.rows(["mark=bad"])["serial"].tolist() == [3])
        wait(lambda: episodes.rows()["return"].tolist() == [5, 4, 3, 2])


def test_fields_with_dotted_names_and_meta_fields_of_any_name_are_columns(
    tmp_path: Path, listed: Callable[..., EpisodeList]
) -> None:
    fields = {"next": {"reward": "float32", "terminated": "bool"}, "terminated": "bool"}
    meta = {name: "int" for name in ("id", "published", "nan", "constant", "mark", "robot.arm")}
    with ReplayBuffer(tmp_path / "nested", 4, 5, fields, meta_fields=meta) as buffer:
        given = {name: 7 for name in meta if "." not in name}
        buffer.store_episode(
            next={"reward": [1, 2], "terminated": [0, 0]}, terminated=[0, 1], robot={"arm": 3}, **given
        )
        episodes = listed(buffer, "next.reward", marks="")
        wait(lambda: episodes.progress == 1)
        (row,) = episodes.page([], None, False, 1, 9)["data"]
        assert (row["_id"], row["id"], row["meta.published"], row["meta.nan"], row["meta.mark"]) == ("0", 7, 7, 7, 7)
        assert (row["return"], row["end"], row["robot.arm"]) == (3, "terminated", 3)
        checks = Checks(episodes, ["next.reward", "next.terminated", "terminated"])
        wait(lambda: checks.report()["done"])
        assert checks.report()["odd"]["constant"] == {"next.reward": 0, "next.terminated": 1, "terminated": 0}
        checks.close()
