"""Items that came since the first draw are given once, before any is drawn again: `sample(new_every=)`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import get_inside, live_index_of, set_inside
from interruptions import interrupted

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotEnoughDataError,
    NStep,
    Offsets,
    RandomCrop,
    ReplayBuffer,
    Timestep,
    Window,
)

FIELDS = {"observation": Field("float32", (2,), final=True), "step": "int", "terminated": "bool", "truncated": "bool"}
Items = list[tuple[int, ...]]


def make(folder: Path, **options: Any) -> ReplayBuffer:
    sizes = {"max_episodes": 12, "max_timesteps": 30, "circular": True, "spare_slots": 6, **options}
    return ReplayBuffer(folder, fields=FIELDS, meta_fields={"env": ("int", (), 0)}, **sizes)


def add(buffer: ReplayBuffer, ended: Any, step: int = 0) -> None:
    size = len(ended)
    seen = {"observation": np.zeros((size, 2)), "next_observation": np.ones((size, 2)), "step": np.full(size, step)}
    buffer.add(**seen, terminated=ended, truncated=np.zeros(size), env=np.arange(size))


def drawn(buffer: Any, count: int, view: Any, every: int, **options: Any) -> Items:
    batch = buffer.sample(count, view=view, new_every=every, return_indices=True, format="numpy", **options)
    return [*map(tuple, batch["_indices"][:, -2:].tolist())]


def every_item(buffer: Any, view: Any) -> Items:
    try:
        batch = buffer.batch(view=view, return_indices=True, format="numpy")
    except NotEnoughDataError:
        return []
    return [*map(tuple, batch["_indices"][:, -2:].tolist())]


def serials_of(changed: Any) -> list[int]:
    return [serial for *_, runs, _ in changed for serial in runs.serial.tolist()]


class Waiting:
    """The slow definition: a queue of every item that was not there before, one of each block of timesteps."""

    def __init__(self, every: int, block_of: Callable[[int, int], Any]) -> None:
        self.every, self.block_of = every, block_of
        self.queue: Items = []
        self.seen: set[Any] | None = None
        self.blocks: set[Any] = set()

    def look(self, items: Items) -> None:
        begins, self.seen = self.seen is None, self.seen or set()
        for item in items:
            if item not in self.seen:
                block = self.block_of(*item)
                if not begins and block not in self.blocks:
                    self.queue.append(item)
                self.blocks.add(block)
                self.seen.add(item)

    def take(self, count: int, items: Items) -> Items:
        taken = []
        while self.queue and len(taken) < count:
            item = self.queue.pop(0)
            if item in items:
                taken.append(item)
        return taken


WAYS = {
    "writer": lambda buffer: buffer,
    "reader": lambda buffer: ReplayBuffer.from_folder(buffer.folder, read_only=True),
    "several folders": lambda buffer: ConcatBuffer([buffer.folder]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("view", "every"),
    [
        (Timestep(), 1),
        (NStep(3), 1),
        (NStep(3, boundary="drop"), 5),
        (Window(4), 4),
        (Window(3, stride=2, pad_before=2), 6),
    ],
)
@pytest.mark.parametrize("options", [{"capacity": 60, "publish": "step"}, {}])
def test_what_came_is_given_first_each_once_and_in_order(
    tmp_path: Path, way: str, view: Any, every: int, options: Any
) -> None:
    rng, buffer = np.random.default_rng(3), make(tmp_path, **options)
    waiting, given, largest = (
        Waiting(every, lambda serial, t: (serial, (t + getattr(view, "pad_before", 0)) // every)),
        0,
        0,
    )
    reader = WAYS[way](buffer)
    for call in range(100):
        add(buffer, rng.random(3) < 0.1)
        if call % 40 == 39:
            buffer.end_episodes()
            buffer.delete(buffer.num_episodes - 2)
        items = every_item(reader, view)
        if items and rng.random() < 0.7:
            waiting.look(items)
            count = int(rng.integers(1, 6))
            expected = waiting.take(count, items)
            found = drawn(reader, count, view, every)
            assert found[: len(expected)] == expected
            assert len(found) == count and {*found} <= {*items}
            given, largest = given + len(expected), max(largest, len(expected))
    assert given > 15 and largest > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_that_run_on_are_taken_one_behind_the_other_of_each_stream(
    tmp_path: Path, way: str, stride: int
) -> None:
    """As DreamerV3's online queue takes them, across the ends of episodes."""
    buffer, rng, length = make(tmp_path, max_episodes=200, publish="step"), np.random.default_rng(0), 6
    view = Window(length, stride=stride, boundary="continue", stream="env")
    options: dict[str, Any] = {"view": view, "new_every": length, "format": "numpy"}
    reader, rest = WAYS[way](buffer), {(env, start) for env in range(3) for start in range(length, 120, length)}
    for step in range(120):
        add(buffer, (rng.random(3) < 0.15) if stride == 1 else [step % 8 == 7] * 3, step)
        if step == length - 1:
            reader.sample(1, **options)
        if step > length and step % 7 == 0:
            due = {(env, start) for env, start in rest if start + length <= step + 1}
            batch = reader.sample(12, **options)
            found = [*zip(batch["env"].tolist(), batch["step"][:, 0].tolist(), strict=True)]
            assert {*found[: len(due)]} == due
            rest -= due
    assert len(rest) <= 6


def test_what_waits_is_given_before_anything_else_and_what_left_meanwhile_is_not(tmp_path: Path) -> None:
    buffer = make(tmp_path, capacity=50, publish="step")
    for step in range(20):
        add(buffer, [False], step)
    buffer.sample(1, timestep_level=True, new_every=1)
    for step in range(20, 80):
        add(buffer, [step % 10 == 9], step)
    batches = [buffer.sample(15, timestep_level=True, new_every=1)["step"].tolist() for _ in range(5)]
    assert [step for batch in batches[:3] for step in batch] == [*range(30, 75)]  # the steps before have left
    assert batches[3][:5] == [*range(75, 80)] and {*batches[3]} <= {*range(30, 80)}
    assert batches[4] != sorted(batches[4])  # none waits: all are drawn


def test_of_steps_that_nobody_takes_the_oldest_that_is_there_is_next(tmp_path: Path) -> None:
    buffer = make(tmp_path, capacity=30, publish="step")
    add(buffer, [False] * 3)
    for step in range(1, 400):
        add(buffer, [step % 10 == 9] * 3, step)
        found = buffer.sample(1, timestep_level=True, new_every=1)["step"].item()
        assert step < 20 or found == step - 9


def test_changes_that_were_made_while_nobody_asked_are_taken_in_and_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, most_touched=5)
    buffer = make(tmp_path, capacity=100, publish="step")
    live = live_index_of(buffer, Timestep())
    add(buffer, [True] * 3)
    assert live.follow() and len(serials_of(live.changed(anew=False))) == 3
    for step in range(1, 7):
        add(buffer, [False], step) if step > 1 else buffer.end_episodes()
        assert live.follow()
        if step == 4:
            assert serials_of(live.changed(anew=False)) == [3]
    for step in range(7, 14):
        add(buffer, [False], step)
        assert live.follow()
    assert serials_of(live.changed(anew=False)) == [0, 1, 2, 3]


def test_changes_are_taken_in_whatever_interrupts_it(tmp_path: Path) -> None:
    buffer = make(tmp_path, max_episodes=200, publish="step")
    live = live_index_of(buffer, Timestep())
    add(buffer, [False])
    assert live.follow() and live.changed(anew=False)
    for at in range(60):
        add(buffer, [True])
        interrupted(live.follow, at)
        assert live.follow()
        assert at in serials_of(live.changed(anew=False))


def test_another_distance_begins_anew_and_of_an_empty_buffer_all_is_new(tmp_path: Path) -> None:
    buffer = make(tmp_path, publish="step")
    with pytest.raises(NotEnoughDataError, match="nothing to read"):
        buffer.sample(1, timestep_level=True, new_every=1)
    for step in range(6):
        add(buffer, [False], step)
    assert buffer.sample(5, timestep_level=True, new_every=1)["step"].tolist() == [0, 1, 2, 3, 4]
    assert buffer.sample(9, timestep_level=True, new_every=2)["step"].tolist() != [5] * 9
    for step in range(6, 9):
        add(buffer, [False], step)
    assert buffer.sample(2, timestep_level=True, new_every=2)["step"].tolist() == [6, 8]


def test_an_end_in_the_middle_of_an_episode_makes_no_earlier_item_new(tmp_path: Path) -> None:
    """Such an episode has several runs of anchors, which are followed by another index, until it has left."""
    buffer = make(tmp_path, max_episodes=3)
    options: dict[str, Any] = {"timestep_level": True, "new_every": 1, "format": "numpy"}

    def given(number: int, *ends: int) -> list[int]:
        steps = {"observation": np.zeros((5, 2)), "step": number + np.arange(5), "truncated": np.zeros(5)}
        buffer.store_episode(**steps, terminated=np.isin(np.arange(5), ends))
        return list(buffer.sample(20, **options)["step"][:5])

    with pytest.raises(NotEnoughDataError, match="nothing to read"):
        buffer.sample(1, **options)
    for number, *ends in ((0, 4), (10, 4), (20, 2, 4), (30, 4), (40, 4), (50, 4), (60, 4)):
        assert given(number, *ends) == [*range(number, number + 5)]


def test_whole_episodes_and_crops_are_new_once_an_episode(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for number in range(7):
        if number == 2:
            buffer.sample(1, window_length=3, new_every=1)
        steps = {"observation": np.zeros((5, 2)), "step": np.full(5, number), "truncated": np.zeros(5)}
        buffer.store_episode(**steps, terminated=np.arange(5) == 4)
    batch = buffer.sample(8, view=RandomCrop(3), new_every=1, return_indices=True)
    assert batch["_index"].shape == (8,)
    assert buffer.sample(5, window_length=3, new_every=1)["step"][:, 0].tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"new_every": 0}, "new_every: got 0"),
        ({"new_every": 1, "seed": 3}, "new_every and seed exclude each other"),
        ({"new_every": 1, "replacement": False}, "new_every and replacement=False exclude each other"),
        ({"new_every": 1, "prioritized": True}, "new_every and prioritized exclude each other"),
        ({"new_every": 1, "weight_by": "env"}, "new_every gives every item alike"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: Any, match: str) -> None:
    buffer = make(tmp_path, publish="step")
    add(buffer, [False])
    with pytest.raises(ValueError, match=match):
        buffer.sample(1, timestep_level=True, **options)


def test_of_each_block_of_timesteps_the_first_item_is_given_wherever_the_first_anchor_is(tmp_path: Path) -> None:
    """Views that need steps before their anchor, and steps that a filter leaves out."""
    buffer = ReplayBuffer(tmp_path, 50, 20, {"x": "int", "valid": "bool"}, circular=True)
    offsets = {"view": Offsets({"x": [-3, 0]}, boundary="drop"), "every": 5}
    assert len(drawn_steps(buffer, 4, 1, **offsets)) == 1
    for _ in range(4):
        buffer.store_episode(x=range(4), valid=np.ones(4))
    assert drawn_steps(buffer, 0, 4, **offsets) == [(serial, 3) for serial in (1, 2, 3, 4)]
    steps = {"view": Timestep(), "every": 5}
    drawn_steps(buffer, 4, 1, **steps)
    buffer.store_episode(x=range(10), valid=np.isin(range(10), [0, 1, 7, 8, 9]))
    assert drawn_steps(buffer, 0, 2, **steps) == [(6, 0), (6, 7)]


def drawn_steps(buffer: ReplayBuffer, length: int, count: int, view: Any, every: int) -> Items:
    if length:
        buffer.store_episode(x=range(length), valid=np.ones(length))
    return drawn(buffer, count, view, every)


@pytest.mark.parametrize("name", ["read_batch", "left_of"])
def test_items_that_could_not_be_read_wait_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    buffer = ReplayBuffer(tmp_path, 50, 20, {"x": "int"}, circular=True)
    options: dict[str, Any] = {"timestep_level": True, "new_every": 1, "format": "numpy"}
    buffer.store_episode(x=[-1])
    buffer.sample(1, **options)
    buffer.store_episode(x=range(20))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="once"):
        set_inside(patch, **{name: lambda *_: raise_interrupt()})
        buffer.sample(5, **options)
    assert buffer.sample(20, **options)["x"].tolist() == [*range(20)]


def raise_interrupt() -> None:
    raise KeyboardInterrupt("once")


def test_the_first_call_lists_no_item_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(tmp_path, 50, 20, {"x": "int"}, circular=True)
    buffer.store_episode(x=range(20))
    listed, anchors = list[int](), get_inside("new_anchors")
    with monkeypatch.context() as patch:
        set_inside(patch, new_anchors=lambda *columns: listed.append(len(columns[1])) or anchors(*columns))
        buffer.sample(1, timestep_level=True, new_every=1)
    assert listed == [0]


def test_a_shard_that_was_made_anew_has_new_items_and_a_mark_makes_some_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, marks_look_seconds=0.0)
    shard = tmp_path / "shard-00000"
    fields, options = {"x": "int"}, {"timestep_level": True, "new_every": 1, "format": "numpy"}
    with ReplayBuffer(shard, 8, 20, fields) as buffer:
        buffer.store_episode(x=range(10))
    root = ConcatBuffer.from_root(tmp_path)
    root.sample(1, **options)
    with ReplayBuffer(shard, 8, 20, fields, overwrite=True) as buffer:
        buffer.store_episode(x=range(100, 110))
    os.utime(tmp_path)
    assert root.sample(10, **options)["x"].tolist() == [*range(100, 110)]
    with ReplayBuffer(shard, 8, 20, fields) as buffer:
        buffer.store_episode(x=[1])
        buffer.store_episode(x=[20, 21])
        buffer.mark([1], add=["good"])
        options["mark"] = "good"
        buffer.sample(1, **options)
        buffer.mark([2], add=["good"])
        assert buffer.sample(2, **options)["x"].tolist() == [20, 21]


def test_items_wait_again_beside_a_thread_that_takes_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(tmp_path, 50, 20, {"x": "int"}, circular=True)
    options: dict[str, Any] = {"timestep_level": True, "new_every": 1, "format": "numpy"}
    buffer.store_episode(x=[-1])
    buffer.sample(1, **options)
    buffer.store_episode(x=range(20))
    reads, takes = threading.Event(), threading.Event()
    read, left_of = get_inside("read_batch"), get_inside("left_of")

    def read_or_fail(*arguments: Any) -> Any:
        if threading.current_thread() is thread:
            reads.set()
            takes.wait(10)
            raise OSError("once")
        return read(*arguments)

    def left_of_while_the_other_fails(*arguments: Any) -> Any:
        if reads.is_set() and not takes.is_set():
            takes.set()
            thread.join(0.2)
        return left_of(*arguments)

    def fail() -> None:
        with pytest.raises(OSError, match="once"):
            buffer.sample(5, **options)

    thread = threading.Thread(target=fail)
    set_inside(monkeypatch, read_batch=read_or_fail, left_of=left_of_while_the_other_fails)
    thread.start()
    assert reads.wait(10)
    given = buffer.sample(5, **options)["x"].tolist()
    thread.join(10)
    given += buffer.sample(15, **options)["x"].tolist()
    assert given == [*range(5, 10), *range(5), *range(10, 20)]
