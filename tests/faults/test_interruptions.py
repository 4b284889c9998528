"""Ctrl-C wherever it comes: an episode ends as published or aborted, a change is done or not, and all goes on."""

from __future__ import annotations

import dis
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from fault_injection import flags_of, without_barriers
from inside import around, get_inside, open_episodes, place_of, publishing_turn_of, set_inside, slots_taken, turn_of
from interruptions import (
    PACKAGE,
    Interrupt,
    content,
    free_for_other_threads,
    interrupted,
    loops_that_pass_by_ends,
    require_whole,
    without_signals,
)
from specification import TERMINATED

from memmap_buffer import EpisodeStateError, Field, ReplayBuffer, verify

MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "step": {"publish": "step"},
    "disk": {"stage": "disk"},
    "power": {"durability": "power"},
    "group": {"durability": "power", "sync_every": 2, "spare_slots": 2},
}


@pytest.fixture(autouse=True)
def no_barriers(monkeypatch):
    without_barriers(monkeypatch)


def make(folder: Path, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(folder, 4, 5, {"x": "int"}, {"task": ("int", (), 0)}, circular=True, **options)


def create(folder: Path) -> None:
    make(folder).close()


def record(buffer: ReplayBuffer, value: int) -> None:
    with buffer.one_episode(task=value) as episode:
        for t in range(2):
            buffer.store(x=10 * value + t)
        episode["task"] = value + 1


def recorded(value: int, steps: int = 2, late: int = 1) -> dict[str, Any]:
    return {"x": [10 * value + t for t in range(steps)], "task": value + late}


def record_by_handle(buffer: ReplayBuffer, value: int) -> None:
    with buffer.begin_episode(task=value) as episode:
        for t in range(2):
            episode.store(x=10 * value + t)
        episode["task"] = value + 1


def record_batch(buffer: ReplayBuffer, value: int) -> None:
    with buffer.batched_episode(1, task=[value]) as group:
        for t in range(2):
            buffer.store_batch(x=[10 * value + t])
        group["task"] = [value + 1]


def record_whole(buffer: ReplayBuffer, value: int) -> None:
    buffer.store_episode(x=[10 * value, 10 * value + 1], task=value + 1)


EVERY_LINE = pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])  # three minutes of an idle machine
some_lines = pytest.mark.parametrize("stride", [EVERY_LINE, 41], ids=["all", "some"])
WAYS = (record, record_by_handle, record_batch, record_whole)
EVERY = [pytest.param(mode, way, 1, marks=pytest.mark.slow) for mode in MODES for way in WAYS]
SOME = [
    ("whole", record, 5),
    ("step", record, 11),
    ("group", record_by_handle, 5),
    ("disk", record_batch, 11),
    ("power", record_whole, 7),
]


@pytest.mark.parametrize(("mode", "way", "stride"), EVERY + SOME)
def test_an_episode_that_is_interrupted_at_any_line_is_published_or_gone_and_the_next_one_is_recorded(
    tmp_path, mode, way, stride
):
    """Also as long as somebody, as a notebook does, keeps the traceback, and so every frame that was left."""
    buffer, value, ended = make(tmp_path, **MODES[mode]), 0, set()
    reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
    while True:
        value += 1
        before = content(buffer)
        error = interrupted(partial(way, buffer, value), stride * (value - 1))
        buffer.flush()
        after = require_whole(tmp_path, buffer, reader)
        new = after[-1:] if after != before else []
        # Steps that were shown at once are kept, as they were then.
        assert new in ([], [recorded(value)]) or (mode == "step" and new[0] in (recorded(value, n, 0) for n in (1, 2)))
        ended.add(bool(new))
        if error is None:
            break
        way(buffer, value)
        buffer.flush()
        assert require_whole(tmp_path, buffer, reader)[-1] == recorded(value), error
        assert open_episodes(buffer) == [] and slots_taken(buffer) == 0, error
    assert stride * value > 150 and ended == {True, False}
    assert verify(tmp_path) == []


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("mode", ["whole", "step"])
def test_after_an_interruption_at_any_line_a_new_object_takes_over(tmp_path, mode, stride):
    """A notebook cell that makes the buffer anew, after Ctrl-C in the one that recorded."""
    value, buffer = 0, make(tmp_path, **MODES[mode])
    while True:
        value += 1
        error = interrupted(partial(record, buffer, value), stride * (value - 1))
        buffer = make(tmp_path, **MODES[mode])
        record(buffer, value)
        assert content(tmp_path)[-1] == recorded(value), error
        if error is None:
            break
    buffer.close()
    assert stride * value > 150 and verify(tmp_path) == []


@some_lines
def test_a_new_object_is_whole_or_not_there_wherever_its_creation_is_interrupted(tmp_path, stride):
    at = 0
    while True:
        error = interrupted(partial(create, tmp_path / f"{at}"), at)
        with make(tmp_path / f"{at}") as buffer:
            record(buffer, 1)
        assert content(tmp_path / f"{at}") == [recorded(1)], error
        if error is None:
            break
        at += stride
    assert at > 150


CHANGES: dict[str, tuple[Callable[[ReplayBuffer], Any], list[list[dict[str, Any]]]]] = {
    "update": (
        lambda buffer: buffer.update([0, 1], task=9),
        [[{**recorded(n), "task": 9} if n <= changed else recorded(n) for n in (1, 2, 3)] for changed in range(3)],
    ),
    "write": (
        lambda buffer: buffer.write([[0, 1], [1, 0]], x=[8, 9]),
        [
            [recorded(n) | {"x": changed} if (changed := values.get(n)) else recorded(n) for n in (1, 2, 3)]
            for values in ({}, {1: [10, 8]}, {1: [10, 8], 2: [9, 21]})
        ],
    ),
    "delete": (
        lambda buffer: buffer.delete([0, 1]),
        [[recorded(n) for n in left] for left in [(1, 2, 3), (2, 3), (1, 3), (3,)]],
    ),
    "clear": (lambda buffer: buffer.clear(), [[recorded(n) for n in (1, 2, 3)], []]),
    "add_field": (
        lambda buffer: buffer.add_field("more", ("int", (), 7)),
        [[recorded(n) for n in (1, 2, 3)], [{**recorded(n), "more": [7, 7]} for n in (1, 2, 3)]],
    ),
    "add_field of what is computed": (
        lambda buffer: buffer.add_field("more", ("int", (), 0), lambda episode: episode["x"] + 1),
        [
            [recorded(n) for n in (1, 2, 3)],
            [{**recorded(n), "more": [10 * n + 1, 10 * n + 2]} for n in (1, 2, 3)],
        ],
    ),
    "drop_field": (
        lambda buffer: buffer.drop_field("task"),
        [[recorded(n) for n in (1, 2, 3)], [{"x": recorded(n)["x"]} for n in (1, 2, 3)]],
    ),
    "rename_field": (
        lambda buffer: buffer.rename_field("task", "job"),
        [
            [recorded(n) for n in (1, 2, 3)],
            [{"x": recorded(n)["x"], "job": recorded(n)["task"]} for n in (1, 2, 3)],
        ],
    ),
    "recompute": (
        lambda buffer: buffer.recompute("x", lambda episode: episode["x"] + 5),
        [
            [{**recorded(n), "x": [10 * n + 5, 10 * n + 6]} if n <= changed else recorded(n) for n in (1, 2, 3)]
            for changed in range(4)
        ],
    ),
    "close": (lambda buffer: buffer.close(), [[recorded(n) for n in (1, 2, 3)]]),
}


@pytest.mark.parametrize(
    "end",
    [
        lambda episode: episode.store(x=2, terminated=True),
        lambda episode: episode.extend(x=[1, 2], terminated=[False, True]),
    ],
    ids=["store", "extend"],
)
def test_what_is_kept_up_to_an_interruption_terminated_only_with_the_step_that_says_so(tmp_path, end):
    at, seen, error = 0, set(), KeyboardInterrupt()
    while error is not None:
        folder = tmp_path / f"{at}"
        with ReplayBuffer(folder, 4, 5, {"x": "int", "terminated": "bool"}) as buffer:
            with suppress(KeyboardInterrupt), buffer.one_episode(keep_partial=True) as episode:
                episode.store(x=0, terminated=False)
                error = interrupted(partial(end, episode), at)
                if error is not None:
                    raise error
            ended = bool(buffer.episode(0)["terminated"][-1])
        assert [bool(flags & TERMINATED) for flags in flags_of(folder).values()] == [ended], error
        seen.add(ended)
        at += 1
    assert seen == {False, True}


@some_lines
def test_a_write_to_an_open_episode_that_is_interrupted_is_done_or_not_and_the_episode_goes_on(tmp_path, stride):
    at, seen, error = -stride, set(), KeyboardInterrupt()
    while error is not None:
        at += stride
        folder = tmp_path / f"{at}"
        with make(folder, publish="step") as buffer:
            record(buffer, 1)
            with buffer.one_episode(task=3) as episode:
                episode.store(x=20)
                episode.store(x=21)
                error = interrupted(partial(buffer.write, [[1, 0], [0, 1], [1, 1]], x=[7, 8, 9]), at)
                written = [tuple(each["x"]) for each in content(folder)]
                episode.store(x=22)
            assert [tuple(each["x"]) for each in content(buffer)] == [written[0], (*written[1], 22)], error
        assert written in ([(10, 11), (20, 21)], [(10, 8), (20, 21)], [(10, 8), (7, 9)])
        assert verify(folder) == []
        seen.add(written[1])
    assert at > 30 and len(seen) == 2


@some_lines
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_interrupted_at_any_line_is_done_or_not_and_all_see_the_same(tmp_path, name, stride):
    change, states = CHANGES[name]
    at, seen, error = -stride, set(), KeyboardInterrupt()
    while error is not None:
        at += stride
        folder = tmp_path / f"{at}"
        buffer = make(folder)
        for value in (1, 2, 3):
            record(buffer, value)
        reader = ReplayBuffer.from_folder(folder, read_only=True)
        error = interrupted(partial(change, buffer), at)
        found = content(buffer)
        assert found in states and content(folder) == found, error
        assert free_for_other_threads(turn_of(buffer))
        if "field" not in name:  # readers of a field that goes are opened again
            require_whole(folder, buffer, reader)
        seen.add(states.index(found))
        if error is not None and found == states[0] and name != "close":
            change(buffer)
            assert content(buffer) == content(folder) == states[-1]
        buffer = make(folder) if name == "close" else buffer
        buffer.store_episode(x=[1, 2])
        assert content(folder)[-1]["x"] == [1, 2]
        buffer.close()
    assert at > 30 and seen >= {0, len(states) - 1}


@pytest.mark.parametrize(
    ("begin", "stride", "group"),
    [*(pytest.param(begin, 7, 1, marks=pytest.mark.slow) for begin in range(7)), (0, 53, 1), (0, 61, 2)],
)
@pytest.mark.parametrize(
    ("way", "sizes"),
    [(record_whole, {"max_episodes": 9, "publish_every": 2}), (record_by_handle, {"max_episodes": 3})],
    ids=["at the end of an episode", "at the begin of one"],
)
def test_a_shard_that_is_finished_while_an_interruption_comes_at_any_line_loses_and_doubles_no_episode(
    tmp_path, monkeypatch, way, sizes, begin, stride, group
):
    """Open episodes go on, and `close` leaves nothing, also as long as somebody keeps the traceback."""
    pytest.importorskip("fsspec")

    sent: list[dict[str, Any]] = []
    set_inside(monkeypatch, publish=lambda path, *_, **__: sent.extend(content(path)))
    options: dict[str, Any] = {"shard": "auto", "publish_to": f"file://{tmp_path}/url", "keep_published": 0, **sizes}
    options |= {"durability": "power", "sync_every": group, "spare_slots": group} if group > 1 else {}
    at, error, went_on = begin - stride, KeyboardInterrupt(), set()
    while error is not None:
        at += stride
        sent.clear()
        root = tmp_path / f"{at}"
        buffer = ReplayBuffer(
            root, max_timesteps=5, fields={"x": "int"}, meta_fields={"task": ("int", (), 0)}, **options
        )
        handles = {value: buffer.begin_episode(task=value + 1) for value in (8, 9)}
        for value, episode in handles.items():
            episode.store(x=10 * value)
        record_whole(buffer, 1)
        first = buffer.folder
        error = interrupted(partial(way, buffer, 2), at)
        assert free_for_other_threads(publishing_turn_of(buffer))
        for value, episode in handles.items():
            episode.store(x=10 * value + 1)
        handles[8].publish()
        record_whole(buffer, 3)
        handles[9].publish()
        assert open_episodes(buffer) == [], error
        went_on.add(buffer.folder != first)
        buffer.close()
        wanted = [recorded(value) for value in (1, 2, 3, 8, 9)]
        found = sorted(sent, key=lambda episode: episode["task"])
        assert found in (wanted, [*wanted[:1], *wanted[2:]]), error
        assert [path.name for path in root.iterdir()] == ["published"], error
        assert not list((root / "published").iterdir())
    assert at > 300 and True in went_on


@pytest.mark.parametrize(
    ("begin", "stride"), [*(pytest.param(begin, 7, marks=pytest.mark.slow) for begin in range(7)), (0, 97)]
)
def test_environments_go_on_where_a_shard_is_finished_while_an_interruption_comes_at_any_line(
    tmp_path, monkeypatch, begin, stride
):
    """Of other timesteps none is lost or doubled, their errors are taken; what was next is right or left out."""
    pytest.importorskip("fsspec")

    sent: list[dict[str, Any]] = []
    set_inside(monkeypatch, publish=lambda path, *_, **__: sent.extend(content(path)))
    fields = {"x": "int", "seen": Field("int", final=True)}
    options: dict[str, Any] = {"shard": "auto", "publish_to": f"file://{tmp_path}/url", "publish_every": 2}

    def add(buffer: ReplayBuffer, t: int) -> None:
        buffer.add(x=[t, 100 + t], seen=[t, 100 + t], priority=[1.0 + t, 2.0 + t])

    at, error = begin - stride, KeyboardInterrupt()
    while error is not None:
        at += stride
        sent.clear()
        buffer = ReplayBuffer(tmp_path / f"{at}", 20, 3, fields, **options)
        for t in range(3):
            add(buffer, t)
        error = interrupted(partial(add, buffer, 3), at)
        for t in range(4, 9):
            add(buffer, t)
        buffer.close()
        stored = sorted(x for episode in sent for x in episode["x"])
        told = [x for x in stored if x not in (3, 103)]
        assert told == [env + t for env in (0, 100) for t in range(9) if t != 3], error
        assert len(set(stored)) == len(stored), error
        cut = [episode["seen"] for episode in sent if episode["x"][0] in (0, 100)]
        assert all(seen[-1] % 100 == len(seen) - 1 for seen in cut), (
            error
        )  # never of step 4, where that of 3 is missing
    assert at > 3000


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_interruption_while_the_end_of_an_interruption_runs_is_made_up_for_by_the_next_call(tmp_path, stride):
    """Ctrl-C twice: the first in the middle of the publication, the second at any line of what settles it."""
    buffer, value = make(tmp_path), 0
    reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
    commit = get_inside("commit")
    for committed in (False, True):
        at, second = 0, Interrupt(0)
        while second.where or not at:
            value, at, second = value + 1, at + stride, Interrupt(at)
            with pytest.MonkeyPatch.context() as patch:
                set_inside(patch, commit=partial(commit_then_interrupt, commit if committed else None, second))
                with pytest.raises(KeyboardInterrupt), buffer.one_episode(task=value):  # noqa: PT011 either of them
                    buffer.store(x=value)
            sys.settrace(None)
            with ReplayBuffer.from_folder(tmp_path, read_only=True) as fresh:
                assert (buffer.num_episodes, buffer.num_steps) == (fresh.num_episodes, fresh.num_steps), second.where
            record(buffer, value)
            assert require_whole(tmp_path, buffer, reader)[-1] == recorded(value), second.where
        assert at > 30


def commit_then_interrupt(commit: Callable[..., Any] | None, second: Interrupt, *arguments: Any) -> None:
    if commit is not None:
        commit(*arguments)
    sys.settrace(second)
    raise KeyboardInterrupt("first")


def test_an_episode_whose_handle_nobody_holds_frees_its_slot_at_the_next_call(tmp_path):
    buffer = make(tmp_path, stage="disk", spare_slots=2)
    first, second = buffer.begin_episode(), buffer.begin_episode()
    with pytest.raises(EpisodeStateError, match="spare_slots=3"):
        buffer.begin_episode()
    del first
    third = buffer.begin_episode()
    for value, episode in enumerate((second, third)):
        episode.store(x=value)
        episode.publish()
    assert [episode["x"] for episode in content(buffer)] == [[0], [1]]


def test_steps_that_were_shown_of_an_episode_that_nobody_holds_stay_flagged_as_cut_short(tmp_path):
    buffer = make(tmp_path, publish="step", spare_slots=2)
    episode = buffer.begin_episode(task=3)
    episode.store(x=1)
    buffer.begin_episode().abort()  # so that the other is not the last one begun, which is kept
    del episode
    with buffer.one_episode() as other:
        other.store(x=2)
    assert [episode["x"] for episode in content(buffer)] == [[1], [2]]
    assert np.load(tmp_path / "episodes.npy")["flags"][0] & 10 == 2  # cut short, and not open
    assert verify(tmp_path) == []


def test_an_episode_that_is_collected_while_another_takes_a_slot_keeps_its_own_until_it_is_ended(tmp_path, monkeypatch):
    """It had left the ring, so its slot is free but for that it is open."""
    buffer = make(tmp_path, publish="step", spare_slots=3)
    held = [buffer.begin_episode()]
    held[0].store(x=9)
    for value in range(7):
        with buffer.one_episode() as episode:
            episode.store(x=value)
    buffer.begin_episode().abort()
    other = buffer.begin_episode()
    with monkeypatch.context() as patch:
        around(patch, *place_of("free_slots"), before=held.clear)
        other.store(x=7)
    other.store(x=8)
    assert [episode["x"] for episode in content(buffer)] == [[4], [5], [6], [7, 8]]


def test_an_episode_within_an_exit_stack_ends_with_it(tmp_path):
    from contextlib import ExitStack

    with make(tmp_path) as buffer:
        with ExitStack() as stack:
            episode = stack.enter_context(buffer.one_episode(task=1))
            buffer.store(x=10), buffer.store(x=11)
            buffer.flush()
            episode["task"] = 2
        assert content(buffer) == [recorded(1)]


def test_a_block_that_is_refused_within_itself_goes_on(tmp_path):
    with make(tmp_path) as buffer:
        block = buffer.one_episode(task=2)
        with block:
            buffer.store(x=10)
            with pytest.raises(EpisodeStateError, match="an episode is open already"), block:
                pass
            buffer.store(x=11)
        assert content(buffer) == [recorded(1)]


def record_batch_by_handle(buffer: ReplayBuffer, value: int) -> None:
    with buffer.begin_batch(1, task=[value + 1]) as group:
        for t in range(2):
            group.store(x=[10 * value + t])


@pytest.mark.parametrize("way", [record, record_by_handle, record_batch, record_batch_by_handle])
def test_an_episode_whose_block_was_left_before_the_first_line_of_its_end_is_over_for_every_call(
    tmp_path, monkeypatch, way
):
    """Also for a thread that did not leave it, and as long as somebody keeps the traceback."""
    buffer = make(tmp_path, stage="disk")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as error:  # noqa: PT011 it has no text
        set_inside(patch, leave_scope=interrupt, leave_episode=interrupt, leave_group=interrupt)
        way(buffer, 1)
    assert buffer.open_episodes == []
    with pytest.raises(EpisodeStateError, match="no episode is open"):
        buffer.store(x=1)
    with pytest.raises(EpisodeStateError, match="no batch is open"):
        buffer.store_batch(x=[1])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(way, buffer, 2).result()  # its slot is free
    way(buffer, 3)
    assert content(buffer) == [recorded(2), recorded(3)], error
    assert open_episodes(buffer) == [] and verify(tmp_path) == []


def test_lines_before_which_no_signal_is_looked_for_are_few_and_those_of_with_and_try():
    def work(lock: Any) -> int:
        with lock:
            try:
                number = 1
            finally:
                number = 2
        return number

    lines = {
        line - work.__code__.co_firstlineno
        for at, line in dis.findlinestarts(work.__code__)
        if at in without_signals(work.__code__)
    }
    assert lines <= {1, 2} and 1 in lines


def codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_of(inner)


def held_and_counted(lock: Any, values: list[int]) -> int:
    with lock:
        number = 0
        while number < len(values):
            number += 1
        return number


HOLDING = ["api", "items", "loading", "priority", "views", "writing", "maintenance/publisher.py", "remote/blocks.py"]
HOLDING += ["format/marks.py", "remote/cache.py", "interop/rows.py", "memmap_replay_buffer"]


@pytest.mark.parametrize("part", HOLDING)
def test_no_loop_passes_by_the_end_of_what_is_held(part):
    """Such a loop is a function of its own, as Python 3.13 would keep a lock for ever."""
    if sys.version_info[:2] == (3, 12):  # of the others some may be mended
        assert loops_that_pass_by_ends(held_and_counted.__code__)
    path = Path(PACKAGE, part)
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for code in codes_of(compile(file.read_text(), file, "exec")):
            assert loops_that_pass_by_ends(code) == [], f"{file}: {code.co_name}"


SIGNALLED = """
    import signal, sys, random
    from pathlib import Path
    from memmap_buffer import ReplayBuffer

    folder, mode, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    options = {"whole": {}, "step": {"publish": "step"}, "disk": {"stage": "disk"}}[mode]
    buffer = ReplayBuffer(folder, 4, 5, {"x": "int"}, {"task": ("int", (), 0)}, circular=True, **options)
    rng, hits, told = random.Random(0), 0, []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for i in range(count):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 3e-3))
            while True:
                with buffer.one_episode(task=i) as episode:
                    for t in range(3):
                        buffer.store(x=t)
                if i % 3 == 0:
                    buffer.update(-1, task=i)
                elif i % 3 == 1:
                    buffer.delete(0)
        except KeyboardInterrupt as error:
            hits += 1
            told.append(error)  # with its frames
        signal.setitimer(signal.ITIMER_REAL, 0)
        if i % 5 == 0:
            buffer = ReplayBuffer.from_folder(folder, **options)
        with buffer.one_episode(task=i):
            for t in range(3):
                buffer.store(x=10 * i + t)
        seen = ReplayBuffer.from_folder(folder, read_only=True)
        assert seen.episode(-1)["x"].tolist() == [10 * i, 10 * i + 1, 10 * i + 2], i
        assert seen.serials.tolist() == buffer.serials.tolist(), i
    buffer.close()
    print(hits)
"""


@pytest.mark.parametrize("mode", ["whole", "step", "disk"])
@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_signals_leave_a_buffer_that_goes_on(tmp_path, mode, count):
    """Real ones, at any instruction; every traceback is kept."""
    program = [sys.executable, "-c", textwrap.dedent(SIGNALLED), str(tmp_path / "buffer"), mode, str(count)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all("finishing an update" in line for line in done.stderr.splitlines()), done.stderr
    assert int(done.stdout) == count
    assert verify(tmp_path / "buffer") == []
