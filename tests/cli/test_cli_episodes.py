"""Episodes by their serials, while a writer goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import Case, episode_of, make
from inside import set_inside

from memmap_buffer import ReplayBuffer
from memmap_buffer.cli import episodes
from memmap_buffer.cli.terminal import Problem


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make(tmp_path / "buffer")


@pytest.fixture
def reader(case: Case) -> Any:
    with ReplayBuffer.from_folder(case.folder, read_only=True) as buffer:
        yield buffer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["4"], [4]),
        (["first", "last"], [2, 9]),
        (["3-5"], [3, 4, 5]),
        (["0-3", "2", "9-100"], [2, 3, 9]),
    ],
    ids=str,
)
def test_episodes_are_named_by_serial_range_and_place(
    reader: ReplayBuffer, names: list[str], expected: list[int]
) -> None:
    assert episodes.serials_of(reader, names) == expected


@pytest.mark.parametrize("name", ["", "-1", "1.5", "5-3", "one", "0", "77", "first"])
def test_an_episode_that_is_not_there_is_a_problem(tmp_path: Path, reader: ReplayBuffer, name: str) -> None:
    buffer = reader if name != "first" else ReplayBuffer(tmp_path / "empty", 2, 3, {"x": "int"})
    with pytest.raises(Problem, match=rf"episode '?{name}"):
        episodes.serials_of(buffer, [name])
    if buffer is not reader:
        buffer.close()


def test_an_episode_is_the_one_of_its_serial_though_the_ring_turns_meanwhile(
    case: Case, reader: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = ReplayBuffer.episode, 0

    def turning(self: ReplayBuffer, position: int) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls <= 2:  # what was at this position is now one to the left
            writer.store_episode(**episode_of(9 + calls, 5))
        return read(self, position)

    with ReplayBuffer.from_folder(case.folder) as writer:
        monkeypatch.setattr(ReplayBuffer, "episode", turning)
        got = episodes.read_episode(reader, 6)
    assert calls == 3
    assert got["action"].tolist() == episode_of(6, case.lengths[6])["action"].tolist()


def test_an_episode_that_the_ring_forgets_meanwhile_is_a_problem(
    case: Case, reader: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ReplayBuffer.episode

    def turning(self: ReplayBuffer, position: int) -> dict[str, Any]:
        writer.store_episode(**episode_of(20, 5))
        return read(self, position)

    with ReplayBuffer.from_folder(case.folder) as writer:
        monkeypatch.setattr(ReplayBuffer, "episode", turning)
        with pytest.raises(Problem, match="episode 4: it is not there any more"):
            episodes.read_episode(reader, 4)


@pytest.mark.parametrize("change", ["publish", "clear", "delete"])
def test_a_table_that_a_writer_changes_meanwhile_has_each_episode_once_and_right(
    case: Case, reader: ReplayBuffer, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, read = [], ReplayBuffer.batch
    changes: dict[str, Callable[[], Any]] = {
        "publish": lambda: writer.store_episode(**episode_of(10, 5)),
        "clear": lambda: writer.clear(),
        "delete": lambda: writer.delete([0, 1, 2]),
    }

    def reading(self: ReplayBuffer, *given: Any, **options: Any) -> Any:
        found = read(self, *given, **options)
        if len(done) == 2:
            changes[change]()
        done.append(1)
        return found

    set_inside(monkeypatch, columns_chunk_bytes=1)
    with ReplayBuffer.from_folder(case.folder) as writer:
        monkeypatch.setattr(ReplayBuffer, "batch", reading)
        table = episodes.table_of(reader)
    shown = {"publish": [*range(3, 11)], "clear": [], "delete": [*range(5, 10)]}
    assert table["serial"].tolist() == shown[change]
    lengths = {**case.lengths, 10: 5}
    returns = {**case.returns, 10: float(episode_of(10, 5)["reward"].sum(dtype=np.float64))}
    assert table["length"].tolist() == [lengths[serial] for serial in table["serial"].tolist()]
    assert table["return"].tolist() == pytest.approx([returns[serial] for serial in table["serial"].tolist()])
