"""Episodes that step together: each is what it would be if it were recorded alone, and a step is of all or of none."""

from __future__ import annotations

import errno
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import system
from inside import around, hand_on, place_of, set_inside, shows_steps, storage_of
from interruptions import interrupted
from ways import way_of

from memmap_buffer import EpisodeStateError, Field, ReplayBuffer, SchemaError, verify

SIZE, STEPS = 3, 12
FIELDS = {
    "x": Field("float32", (3,), final=True),
    "note": "U5",
    "members": Field("int16", (None,)),
    "frame": Field("uint8", (24, 24), codec="zstd"),
    "terminated": "bool",
}
PLAIN = {name: FIELDS[name] for name in ("x", "note", "terminated")}
MODES = {
    "ram": {},
    "disk": {"stage": "disk"},
    "step": {"publish": "step"},
    "power": {"publish": "step", "durability": "power"},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    set_inside(monkeypatch, staged_bytes=100)  # so that what is staged is written out, too
    set_inside(monkeypatch, first_capacity=2)  # and grows
    set_inside(monkeypatch, barrier_of_commit=lambda fd: None)


def step_of(value: int, fields: dict[str, Any]) -> dict[str, Any]:
    step = {
        "x": np.full(3, value, np.float32),
        "note": f"n{value}",
        "members": np.arange(value % 4, dtype=np.int16),
        "frame": np.full((24, 24), value, np.uint8),
        "terminated": False,
    }
    return {name: step[name] for name in fields}


def batch_of(values: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    steps = [step_of(value, fields) for value in values]
    return {name: [step[name] for step in steps] for name in fields}


def contents(buffer: ReplayBuffer) -> list[dict[str, Any]]:
    episodes = [buffer.episode(i) for i in range(len(buffer))]
    return [{name: np.asarray(rows).tolist() for name, rows in one.items()} for one in episodes]


@pytest.mark.parametrize("fields", [PLAIN, FIELDS], ids=["plain", "lists and codecs"])
@pytest.mark.parametrize("how", MODES.values(), ids=MODES)
@pytest.mark.parametrize("seed", range(4))
def test_each_episode_is_that_which_is_recorded_alone(
    tmp_path: Path, how: dict[str, Any], fields: dict[str, Any], seed: int
) -> None:
    """Also where some are given steps by themselves in between, one or several, or such as are refused."""
    rng, value = np.random.default_rng(seed), count()
    together, alone = (
        ReplayBuffer(tmp_path / name, 9, STEPS, fields, spare_slots=SIZE + 1, **how) for name in ("together", "alone")
    )
    others = [alone.begin_episode() for _ in range(SIZE)]
    with together.batched_episode(SIZE) as group:
        while max(other.length for other in others) < STEPS:
            values = [next(value) for _ in others]
            together.store_batch(**batch_of(values, fields))
            for other, one in zip(others, values, strict=True):
                other.store(**step_of(one, fields))
            for i in np.flatnonzero(rng.random(SIZE) < 0.3).tolist():
                several = batch_of([next(value) for _ in range(rng.integers(4))], fields)
                several = {name: rows[: STEPS - others[i].length] for name, rows in several.items()} if several else {}
                for episode in (group.episodes[i], others[i]):
                    if not several or not several["x"]:
                        with pytest.raises((SchemaError, EpisodeStateError)):
                            episode.store(**step_of(0, fields) | {"x": "none"})
                    elif len(several["x"]) == 1:
                        episode.store(**{name: rows[0] for name, rows in several.items()})
                    else:
                        episode.extend(**several)
        lengths = [one.length for one in group.episodes]
        with pytest.raises(EpisodeStateError, match=f"longer than max_timesteps \\({STEPS}\\)"):
            together.store_batch(**batch_of([0] * SIZE, fields))
        assert lengths == [one.length for one in group.episodes]
        group.final(x=np.arange(3 * SIZE).reshape(SIZE, 3))
    for i, other in enumerate(others):
        other.final(x=np.arange(3 * i, 3 * i + 3))
        other.publish()
    assert contents(together) == contents(alone)
    for buffer in (together, alone):
        buffer.close()
        assert verify(buffer.folder) == []


def test_a_member_that_ended_or_is_over_refuses_a_step_for_all(tmp_path: Path) -> None:
    for name, end in {"ended": None, "published": "publish", "aborted": "abort"}.items():
        buffer = ReplayBuffer(tmp_path / name, 9, STEPS, PLAIN)
        with buffer.batched_episode(SIZE) as group:
            values = batch_of([1, 2, 3], PLAIN)
            group.store(**values | {"terminated": [False, end is None, False]})
            if end is not None:
                getattr(group.episodes[1], end)()
            with pytest.raises(EpisodeStateError, match=name):
                group.store(**values)
            assert [one.length for one in group.episodes] == [1, 1, 1]
        assert len(buffer) == 3 - (name == "aborted")


def lengths_shown(buffer: ReplayBuffer, group: Any) -> set[int]:
    """How many timesteps the open episodes have, and how many of them are shown."""
    lengths = {one.length for one in group.episodes}
    if shows_steps(buffer):
        steps = storage_of(buffer).refresh()
        slots = steps.visible[np.isin(steps.serial[steps.visible], [one.serial for one in group.episodes])]
        shown = steps.length[slots].tolist() or [0]
        assert len(shown) in (1, SIZE)
        lengths |= {*shown}
    return lengths


@pytest.mark.parametrize("how", MODES.values(), ids=MODES)
@pytest.mark.parametrize("error", ["ENOSPC", "signal"])
def test_a_step_that_is_interrupted_is_of_all_or_of_none(tmp_path: Path, how: dict[str, Any], error: str) -> None:
    failed = 0
    for at in range(1, 19) if error == "ENOSPC" else range(2, 120, 5):
        buffer = ReplayBuffer(tmp_path / str(at), 9, STEPS, PLAIN, spare_slots=SIZE + 1, **how)
        with buffer.batched_episode(SIZE) as group:
            for call in range(2 + at % 3):
                group.store(**batch_of([call] * SIZE, PLAIN))
            before = group.episodes[0].length
            work = partial(group.store, **batch_of([7] * SIZE, PLAIN))
            if error == "signal":
                raised: Any = interrupted(work, 5 * at)
            else:
                raised = None
                with system(at, error=errno.ENOSPC, only=("pwrite",)):
                    try:
                        work()
                    except OSError as problem:
                        raised = problem
            failed += raised is not None
            group.store(**batch_of([8] * SIZE, PLAIN))
            lengths = lengths_shown(buffer, group)
            assert len(lengths) == 1 and lengths <= {before + 1, before + 2}, raised
        assert {len(buffer.episode(i)["x"]) for i in range(len(buffer))} == lengths
        buffer.close()
        assert verify(tmp_path / str(at)) == []
    assert failed > 3 or (error == "ENOSPC" and not how)


def test_what_is_interrupted_in_a_block_that_goes_on_to_its_end_is_of_all_or_of_none(tmp_path: Path) -> None:
    places = set()
    for at in range(0, 300, 11):
        buffer = ReplayBuffer(tmp_path / str(at), 9, STEPS, PLAIN)
        with buffer.batched_episode(SIZE) as group:
            group.store(**batch_of([1] * SIZE, PLAIN))
            places.add(str(interrupted(partial(group.store, **batch_of([2] * SIZE, PLAIN)), at)))
        assert {len(buffer.episode(i)["x"]) for i in range(SIZE)} in ({1}, {2})
    assert len(places) > 5


@pytest.mark.parametrize("how", MODES.values(), ids=MODES)
def test_a_step_beyond_the_longest_episode_touches_no_other(tmp_path: Path, how: dict[str, Any]) -> None:
    with ReplayBuffer(tmp_path, 9, 3, PLAIN, spare_slots=SIZE + 1, **how) as buffer:
        for value in range(6):  # the slots around
            buffer.store_episode(**batch_of([100 + value] * 3, PLAIN))
        with buffer.batched_episode(SIZE) as group:
            for value in range(5):
                try:
                    group.store(**batch_of([value] * SIZE, PLAIN))
                except EpisodeStateError:
                    assert value >= 3
                else:
                    assert value < 3
        assert [[row[0] for row in each["x"]] for each in contents(buffer)] == [
            *[[100 + value] * 3 for value in range(6)],
            *[[0, 1, 2]] * SIZE,
        ]
    assert verify(tmp_path) == []


@pytest.mark.parametrize("handed_on", [False, True])
def test_after_an_interrupted_step_members_go_on_alone_and_in_another_folder(tmp_path: Path, handed_on: bool) -> None:
    places = set()
    for at in range(5, 300, 9):
        buffer, other = (ReplayBuffer(tmp_path / f"{at}{name}", 9, STEPS, PLAIN) for name in "ab")
        with buffer.batched_episode(SIZE) as group:
            group.store(**batch_of([1] * SIZE, PLAIN))
            places.add(str(interrupted(partial(group.store, **batch_of([2] * SIZE, PLAIN)), at)))
            if handed_on:
                hand_on(buffer, other)
            else:
                group.episodes[1].store(**step_of(7, PLAIN))
            group.store(**batch_of([8] * SIZE, PLAIN))
        found = [[row[0] for row in each["x"]] for each in contents(other if handed_on else buffer)]
        rest = [[*([7] * (i == 1 and not handed_on)), 8] for i in range(SIZE)]
        assert found in ([[1, *each] for each in rest], [[1, 2, *each] for each in rest]), at
    assert len(places) > 5


@pytest.mark.parametrize("how", [MODES["ram"], MODES["disk"], MODES["step"]], ids=["ram", "disk", "step"])
def test_a_member_that_comes_back_and_is_interrupted_in_between_loses_no_step(
    tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given steps of its own, so that the next step of all is another row of its than of the others."""

    def interrupt() -> None:
        raise KeyboardInterrupt("before it is known where its next step belongs")

    with ReplayBuffer(tmp_path, 9, STEPS, {"x": "int64"}, spare_slots=SIZE + 1, **how) as buffer:
        with buffer.batched_episode(SIZE) as group:
            group.store(x=[1] * SIZE)
            for _ in range(8):
                group.episodes[1].store(x=7)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="where its next step"):
                around(patch, *place_of("look_of_round"), after=interrupt)
                group.store(x=[2] * SIZE)
            group.store(x=[3] * SIZE)
            group.store(x=[4] * SIZE)
        assert [each["x"] for each in contents(buffer)] == [[1, *([7] * 8 * (i == 1)), 3, 4] for i in range(SIZE)]


@pytest.mark.parametrize("how", [MODES["ram"], MODES["step"]], ids=["ram", "step"])
def test_a_step_takes_as_many_calls_however_many_episodes_there_are(tmp_path: Path, how: dict[str, Any]) -> None:
    calls = []
    for size in (4, 64):
        buffer = ReplayBuffer(tmp_path / str(size), 99, STEPS, PLAIN, spare_slots=size + 1, **how)
        with buffer.batched_episode(size) as group:
            batch = {name: np.asarray(rows) for name, rows in batch_of([1] * size, PLAIN).items()}
            work = partial(group.store, **batch)
            for _ in range(3):
                work()
            calls.append(len(way_of(work).functions))
            group.abort()
    assert calls[1] <= calls[0] + 60 + 4  # of each episode it is looked whether it goes on
