"""Every export is of the whole episodes that were there when it began; what fails on the way leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partialmethod
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL
from typing import Any

import av.error
import gymnasium
import h5py
import minari
import numpy as np
import pytest

from memmap_buffer import Field, ReplayBuffer, SchemaError, StaleEpisodeError
from memmap_buffer.adapters import exported_episodes, put_when_whole
from memmap_buffer.interop.lerobot_dataset import DiskLeRobotDataset
from memmap_buffer.interop.memmap_replay_buffer import import_memmap_replay_buffer

FIELDS = {
    "observation": Field("float32", (2,), final=True),
    "action": ("float32", (1,)),
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
}


class Env(gymnasium.Env):
    """Spaces for Minari."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)


OPTIONS: dict[str, dict[str, Any]] = {
    "d4rl": {},
    "ogbench": {},
    "robomimic": {},
    "minari": {"env": Env()},
    "lerobot": {"fps": 10},
    "memmap_replay_buffer": {},
    "parquet": {},
}


def export(name: str, buffer: ReplayBuffer, place: Path) -> Any:
    """Export to where `place` says; of Minari that is what its environment variable names."""
    target = "ours/kinds-v0" if name == "minari" else place / "data"
    return getattr(import_module(f"memmap_buffer.interop.{name}"), f"export_{name}")(buffer, target, **OPTIONS[name])


def store(buffer: ReplayBuffer, number: int, length: int, **more: Any) -> None:
    """An episode whose values are its number."""
    buffer.store_episode(
        observation=np.full((length + 1, 2), number),
        action=np.full((length, 1), number),
        reward=np.full(length, number),
        terminated=np.arange(length) == length - 1,
        truncated=np.zeros(length),
        **more,
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(place))
    return place


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[ReplayBuffer]:
    """A ring that is full of episodes 1 to 4, of 3 steps each."""
    with ReplayBuffer(tmp_path / "ring", 4, 9, FIELDS, circular=True) as writer:
        for number in range(1, 5):
            store(writer, number, 3)
        yield writer


def test_the_episodes_of_an_export_are_those_of_its_beginning(ring: ReplayBuffer) -> None:
    episodes = exported_episodes(ReplayBuffer.from_folder(ring.folder, read_only=True))
    assert (len(episodes), episodes.num_steps, episodes.serials.tolist()) == (4, 12, [0, 1, 2, 3])
    seen, reading = [], iter(episodes)
    for _ in range(3):
        rows, columns = next(reading)
        seen.append((rows, columns["reward"].tolist(), len(columns["observation"])))
        store(ring, 9, 7)  # in the place of what was read
    assert seen == [(range(3 * i, 3 * i + 3), [i + 1] * 3, 4) for i in range(3)]
    for _ in range(2):
        store(ring, 9, 7)
    with pytest.raises(StaleEpisodeError, match=r"\[3\] were overwritten"):
        next(reading)


def test_a_buffer_without_episodes_is_exported_as_such(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "empty", 4, 9, {"x": "int"}) as buffer:
        assert [*exported_episodes(buffer)] == []
        export("memmap_replay_buffer", buffer, tmp_path)
    with import_memmap_replay_buffer(tmp_path / "data", tmp_path / "copy") as copy:
        assert (copy.num_episodes, copy.fieldnames) == (0, ("x",))


def test_an_episode_that_goes_on_during_an_export_is_as_long_as_at_its_beginning(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "data", 4, 9, FIELDS, publish="step") as writer:
        step = {"action": [0], "reward": 0, "terminated": False, "truncated": False}
        writer.add(observation=[0, 0], **step)
        episodes = exported_episodes(writer)
        writer.add(observation=[1, 1], next_observation=[2, 2], **{**step, "terminated": True})
        ((rows, columns),) = episodes
    assert rows == range(1) and columns["observation"].tolist() == [[0, 0]] and columns["terminated"].tolist() == [0]


@pytest.mark.parametrize("name", ["d4rl", "ogbench"])
def test_steps_of_an_episode_that_a_capacity_has_trimmed_are_not_exported(
    tmp_path: Path, place: Path, name: str
) -> None:
    with ReplayBuffer(tmp_path / "data", fields=FIELDS, capacity=10, max_timesteps=9) as buffer:
        for number in range(1, 6):
            store(buffer, number, 4)
        assert (buffer.num_steps, buffer.episode_lens.tolist()) == (10, [4, 4])
        export(name, buffer, place)
    module = import_module(f"memmap_buffer.interop.{name}")
    with getattr(module, f"import_{name}")(place / "data", tmp_path / "copy") as copy:
        assert [copy.episode(i)["reward"].tolist() for i in range(len(copy))] == [[4] * 4, [5] * 4]


def total_of_robomimic(place: Path) -> int:
    with h5py.File(place / "data") as file:
        return int(file["data"].attrs["total"])


def total_of_lerobot(place: Path) -> int:
    info = json.loads((place / "data/meta/info.json").read_text())
    stats = json.loads((place / "data/meta/stats.json").read_text())
    assert stats["action"]["count"] == [info["total_frames"]]
    return int(info["total_frames"])


@pytest.mark.parametrize(
    ("name", "total"), [("robomimic", total_of_robomimic), ("lerobot", total_of_lerobot)], ids=["robomimic", "lerobot"]
)
def test_the_total_of_an_export_counts_the_steps_in_it(
    tmp_path: Path, place: Path, name: str, total: Callable[[Path], int]
) -> None:
    with ReplayBuffer(tmp_path / "data", fields=FIELDS, capacity=10, max_timesteps=9) as buffer:
        for number in range(1, 6):
            store(buffer, number, 4)
        export(name, buffer, place)
    assert total(place) == 8


@pytest.mark.parametrize("name", OPTIONS)
def test_an_export_that_fails_leaves_nothing_and_is_not_in_the_way_of_the_next(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dataset = ReplayBuffer.dataset

    def overwritten(self: ReplayBuffer, **options: Any) -> Any:
        """A data set whose third episode is gone when it is asked for."""
        items: Any = dataset(self, **options)
        read, asked = items.at, []

        def at(indices: Any) -> Any:
            asked.append(indices)
            for _ in range(4 if len(asked) == 3 else 0):
                store(ring, 9, 7)
            return read(indices)

        items.at = at
        return items

    with monkeypatch.context() as patch:
        patch.setattr(ReplayBuffer, "dataset", overwritten)
        with pytest.raises(StaleEpisodeError, match="were overwritten"):
            export(name, ring, place)
    assert [*place.iterdir()] == []
    export(name, ring, place)
    assert [*place.iterdir()] != []


@pytest.mark.parametrize(
    ("name", "field", "other", "place_of_both"),
    [
        ("d4rl", "x", "info.x", "infos/x"),
        ("minari", "x", "info.x", "x"),
        ("robomimic", "dones", None, "dones"),
        ("robomimic", "actions", None, "actions"),
        ("lerobot", "index", None, "index"),
        ("lerobot", "task_index", None, "task_index"),
        ("lerobot", "next.reward", None, "next.reward"),
    ],
)
def test_two_fields_that_would_have_one_place_are_refused(
    tmp_path: Path, place: Path, name: str, field: str, other: str | None, place_of_both: str
) -> None:
    more = {each: "int" for each in (field, other) if each is not None}
    with ReplayBuffer(tmp_path / "data", 2, 9, {**FIELDS, **more}) as buffer:
        store(buffer, 1, 3, **{key: [1, 2, 3] for key in more})
        with pytest.raises(SchemaError, match=f"it would be '{place_of_both}' in .* `rename_field`"):
            export(name, buffer, place)
    assert not [*place.iterdir()]


@pytest.mark.parametrize(
    ("name", "outer", "inner", "error"),
    [
        ("d4rl", "x", "info.x.y", "'infos/x/y' in D4RL, within field 'x'"),
        ("minari", "x", "info.x.y", "'x/y' in Minari, within field 'x'"),
        ("robomimic", None, "actions.x", "'actions/x' in robomimic, within field 'action'"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_field_that_would_lie_within_another_one_is_refused(
    tmp_path: Path, place: Path, name: str, outer: str | None, inner: str, error: str, first: bool
) -> None:
    names = [each for each in ((outer, inner) if first else (inner, outer)) if each is not None]
    with ReplayBuffer(tmp_path / "data", 2, 9, {**FIELDS, **dict.fromkeys(names, "int")}) as buffer:
        store(buffer, 1, 3, **{key: [1, 2, 3] for key in names})
        with pytest.raises(SchemaError, match=f"field '{inner}': it would be {error}; .* `rename_field`"):
            export(name, buffer, place)
    assert not [*place.iterdir()]


def test_a_data_set_of_lerobots_form_has_no_counter_of_its_own(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "data", 2, 9, {**FIELDS, "index": "int"}) as buffer:
        store(buffer, 1, 3, index=[7, 8, 9])
        with pytest.raises(SchemaError, match="'index' in LeRobot, as what LeRobot counts itself is"):
            DiskLeRobotDataset("some/name", buffer, fps=10)


@pytest.mark.parametrize("name", ["d4rl", "robomimic", "ogbench", "memmap_replay_buffer", "lerobot", "parquet"])
def test_what_was_there_before_an_export_that_fails_is_still_there(ring: ReplayBuffer, place: Path, name: str) -> None:
    (place / "data/data/chunk-000").mkdir(parents=True)
    (place / "data/steps.parquet").mkdir()
    (place / "data/data/mine").write_text("mine")
    with pytest.raises((OSError, SchemaError)):
        export(name, ring, place)
    assert [path for path in place.rglob("*") if path.is_file()] == [place / "data/data/mine"]


@pytest.mark.parametrize("name", ["d4rl", "robomimic", "memmap_replay_buffer"])
def test_a_link_that_leads_nowhere_is_not_removed(ring: ReplayBuffer, place: Path, name: str) -> None:
    (place / "data").symlink_to("elsewhere")
    with pytest.raises(FileExistsError, match="exists"):
        export(name, ring, place)
    assert [(path.name, path.is_symlink()) for path in place.iterdir()] == [("data", True)]


def test_the_file_of_another_export_that_was_faster_is_not_removed(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = h5py.File

    def late(path: Path, mode: str) -> Any:
        (place / "data").write_text("theirs")
        return opened(path, mode)

    for name in ("d4rl", "robomimic"):
        with monkeypatch.context() as patch:
            patch.setattr("h5py.File", late)
            with pytest.raises(FileExistsError, match="exists"):
                export(name, ring, place)
        assert [(path.name, path.read_text()) for path in place.iterdir()] == [("data", "theirs")]
        (place / "data").unlink()


MOVES = ("replace", "rename", "hardlink_to")


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "ogbench"])  # which replaces
def test_of_two_exports_to_one_place_at_once_the_faster_one_stays(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def overtaken(first: Path, move: Callable[[Path, Path], Any], second: Path) -> Any:
        """The move to the place, before which the other export comes to its end."""
        patch.undo()
        export(name, ring, place)
        theirs.update({path: data for path, data in files().items() if not re.search(r"/\.", str(path))})
        return move(first, second)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}

    theirs: dict[Path, bytes] = {}
    with monkeypatch.context() as patch:
        for move in MOVES:
            patch.setattr(Path, move, partialmethod(overtaken, getattr(Path, move)))
        with pytest.raises(FileExistsError, match="it exists already; give a new name"):
            export(name, ring, place)
    assert theirs and files() == theirs


def test_a_file_comes_to_its_place_also_where_the_file_system_has_no_links(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(target))

    monkeypatch.setattr(Path, "hardlink_to", refused)
    export("robomimic", ring, place)
    assert total_of_robomimic(place) == 12


def test_what_was_written_through_a_link_is_removed(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez_compressed", fail)
    (place / "data").symlink_to("elsewhere")
    with pytest.raises(OSError, match="No space"):
        export("ogbench", ring, place)
    assert [(path.name, path.is_symlink()) for path in place.iterdir()] == [("data", True)]


def test_a_file_that_an_export_would_replace_stays_until_the_new_one_is_whole(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export("ogbench", ring, place)
    before = (place / "data").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("numpy.savez_compressed", lambda file, **arrays: file.write(b"half") and 1 / 0)
        with pytest.raises(ZeroDivisionError, match="by zero"):
            export("ogbench", ring, place)
    assert [(path.name, path.read_bytes()) for path in place.iterdir()] == [("data", before)]
    store(ring, 9, 2)
    export("ogbench", ring, place)
    assert (place / "data").read_bytes() != before


def test_an_error_names_the_place_of_the_export_and_not_the_hidden_folder(
    ring: ReplayBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, **arrays: Any) -> None:
        raise OSError(28, "No space left on device", file.name)

    monkeypatch.setattr("numpy.savez_compressed", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{place / 'data'}'")):
        export("ogbench", ring, place)


def test_an_error_of_the_library_that_writes_the_file_stays_and_names_the_place(place: Path) -> None:
    path = place / "data"
    with (
        pytest.raises(av.error.OSError, match=re.escape(f"No space left on device: '{path}'")),
        put_when_whole(path) as new,
    ):
        raise av.error.OSError(28, "No space left on device", str(new / path.name))
    with pytest.raises(FileExistsError, match=re.escape(f"name = '{path}'")), put_when_whole(path) as new:
        (new / path.name).touch()
        h5py.File(new / path.name, "x")


def test_a_place_may_have_a_name_as_long_as_the_system_allows(place: Path) -> None:
    for name in ("x" * 255, "\N{GRINNING FACE}" * 63):
        with put_when_whole(place / name) as new:
            (new / name).mkdir()
    assert len([*place.iterdir()]) == 2


def test_an_error_names_the_place_also_where_no_folder_can_be_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str, mode: int) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("tempfile._os.mkdir", denied)
    with pytest.raises(PermissionError, match=re.escape(f"'{place / 'data'}'")), put_when_whole(place / "data"):
        pass


@pytest.mark.parametrize("name", OPTIONS)
def test_an_export_that_is_killed_leaves_nothing_that_looks_like_all_of_it(
    ring: ReplayBuffer, place: Path, name: str
) -> None:
    process = get_context("fork").Process(target=die_in_an_export, args=(name, ring.folder, place))
    process.start()
    process.join()
    assert process.exitcode == -SIGKILL
    files = [path.relative_to(place) for path in place.rglob("*") if path.is_file()]
    assert files and all(any(part.startswith(".") for part in path.parts) for path in files)
    export(name, ring, place)


def die_in_an_export(name: str, folder: Path, place: Path) -> None:
    """Kill this process when everything is written, and nothing is moved yet."""
    with pytest.MonkeyPatch.context() as patch:
        for move in MOVES:
            patch.setattr(Path, move, lambda *_: os.kill(os.getpid(), SIGKILL))
        export(name, ReplayBuffer.from_folder(folder, read_only=True), place)


def test_a_link_to_a_file_stays_when_the_file_is_replaced(ring: ReplayBuffer, place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("old")
    (place / "data").symlink_to(tmp_path / "elsewhere")
    export("ogbench", ring, place)
    assert (place / "data").is_symlink() and (tmp_path / "elsewhere").read_bytes()[:2] == b"PK"


def test_a_data_set_of_minari_that_is_there_stays(ring: ReplayBuffer, place: Path) -> None:
    first = export("minari", ring, place)
    with pytest.raises(ValueError, match="already available"):
        export("minari", ring, place)
    assert minari.load_dataset("ours/kinds-v0").total_episodes == first.total_episodes == 4
