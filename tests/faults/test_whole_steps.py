"""A step of several environments that is interrupted anywhere: all of them have it or none, and all goes on rightly.

What is drawn afterwards is judged by its successors, which each environment knows, not by what rows there are.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import FIELDS, Environments, require_true_successors, steps_in
from fault_injection import flags_of, system, without_barriers
from inside import around, get_inside, place_of, set_inside
from interruptions import interrupted
from specification import FINAL

from memmap_buffer import Field, Prioritized, ReplayBuffer, verify

SIZE, LIMIT = 3, 4
MODES: dict[str, dict[str, Any]] = {
    "ram": {},
    "disk": {"stage": "disk"},
    "step": {"publish": "step"},
    "written": {"publish": "step"},
    "power": {"publish": "step", "durability": "power"},
}
ENDS = {"plain": [0, 0, 0], "end": [1, 2, 0], "every": [2, 1, 1]}
# What is given before the step that is interrupted, and with it.
KINDS = {"plain": ["plain", "plain"], "end": ["plain", "end"], "first": ["end", "plain"], "limit": ["plain"] * 4}
KINDS |= {"every": ["plain", "every"], "firsts": ["every", "plain"], "first that ends": ["end", "end"]}


class Program:
    """A program that adds what its environments do, and goes on with the next step whatever happened to one.

    Args: following, errors: whether it gives `next_observation`, and TD errors.
    """

    def __init__(
        self, folder: Path, mode: str, *, skips_resets: bool, following: bool, errors: bool = False, **options: Any
    ) -> None:
        self.folder, self.how = folder, MODES[mode]
        options = {"circular": True, "spare_slots": SIZE, "skips_resets": skips_resets, **self.how, **options}
        self.buffer = ReplayBuffer(folder, 400, LIMIT, FIELDS, **options)
        self.environments = Environments(SIZE, skips_resets=skips_resets)
        self.following, self.errors = following, errors
        self.given: list[set[tuple[int, ...]]] = []

    def step(self, kind: str) -> dict[str, Any]:
        step = self.environments.step(ENDS[kind])
        if not self.following:
            del step["next_observation"]
        return {**step, "priority": np.ones(SIZE)} if self.errors else step

    def add(self, *kinds: str) -> None:
        for kind in kinds:
            self.buffer.add(**self.step(kind))

    def interrupted_add(self, kind: str, interrupt: Callable[[Callable[[], Any]], Any]) -> Any:
        """Add a step that is interrupted; what `interrupt` says."""
        recorded = self.environments.recorded
        step = self.step(kind)
        self.given.append({tuple(row) for row in step["observation"][recorded].tolist()})
        told = interrupt(partial(self.buffer.add, **step))
        if self.how.get("publish") == "step":
            self.require_whole_steps()
        return told

    def require_whole_steps(self) -> None:
        """Every step that was interrupted is of all environments or of none, for all who look."""
        found = steps_in(self.folder)
        assert steps_in(self.buffer) == found
        for step in self.given:
            assert len(step & found) in (0, len(step)), (step & found, step)

    def end(self) -> None:
        self.buffer.end_episodes()
        self.require_whole_steps()
        assert require_true_successors(self.buffer, self.environments)
        self.buffer.close()
        assert [finding for finding in verify(self.folder) if finding.lost] == []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_barriers(monkeypatch)
    set_inside(monkeypatch, staged_bytes=100)  # so that what is staged is written out, too


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "written":
        set_inside(monkeypatch, stores_are_writes=lambda path: False)
    return str(request.param)


def programs(folder: Path, mode: str, **how: Any) -> Iterator[Program]:
    """A program anew after some interruptions, so that what is looked at stays little."""
    for i in count():
        program = Program(folder / str(i), mode, **how)
        for _ in range(20):
            yield program
        program.end()


@pytest.mark.parametrize("stride", [23, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["ram", "step", "written"], indirect=True)
def test_where_the_episodes_are_ended_right_after_an_interruption_an_end_that_is_shown_counts(
    tmp_path: Path, mode: str, stride: int
) -> None:
    for at in count(0, stride):
        program = Program(tmp_path / str(at), mode, skips_resets=False, following=True)
        program.add("plain", "plain")
        error = program.interrupted_add("end", partial(interrupted, at=at))
        program.end()
        if error is None:
            break


@pytest.mark.parametrize("stride", [23, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["step", "written"], indirect=True)
def test_a_final_observation_that_is_shown_when_its_step_is_interrupted_stays(
    tmp_path: Path, mode: str, stride: int
) -> None:
    num_shown = 0
    for at in count(0, stride):
        program = Program(tmp_path / str(at), mode, skips_resets=False, following=True)
        program.add("plain", "plain")
        error = program.interrupted_add("end", partial(interrupted, at=at))
        before = {serial for serial, flags in flags_of(program.folder).items() if flags & FINAL}
        program.add("plain")
        assert before <= {serial for serial, flags in flags_of(program.folder).items() if flags & FINAL}
        num_shown += bool(before) and error is not None
        program.end()
        if error is None:
            break
    assert num_shown > 0


@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("environments", [None, [0]], ids=["of all", "of one"])
@pytest.mark.parametrize("mode", ["ram", "step", "written"], indirect=True)
def test_where_the_end_of_episodes_is_interrupted_the_next_step_ends_the_others(
    tmp_path: Path, mode: str, environments: list[int] | None, stride: int
) -> None:
    for at in count(0, stride):
        program = Program(tmp_path / str(at), mode, skips_resets=False, following=True)
        program.add("plain", "plain")
        error = interrupted(partial(program.buffer.end_episodes, environments), at=at)
        program.add("plain", "end")
        program.buffer.end_episodes()
        assert program.buffer.num_steps == program.buffer.num_added == 4 * SIZE
        program.end()
        if error is None:
            break


@pytest.mark.parametrize("mode", ["ram", "step", "written"], indirect=True)
def test_where_all_episodes_are_ended_and_it_is_interrupted_then_the_next_step_begins_others(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt("behind the last")

    program = Program(tmp_path / "program", mode, skips_resets=False, following=True)
    program.add("plain", "plain")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="behind the last"):
        around(patch, *place_of("publish_stream"), after=interrupt)
        program.buffer.end_episodes()
    program.add("plain", "end")
    program.end()
    assert program.buffer.num_episodes == 2 * SIZE
    assert program.buffer.num_steps == 4 * SIZE


@pytest.mark.parametrize("stride", [31, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", [2, 4])
def test_where_the_end_of_all_episodes_is_interrupted_those_that_wait_for_their_commit_are_published_once(
    tmp_path: Path, group: int, stride: int
) -> None:
    options = {"durability": "power", "sync_every": group, "spare_slots": 8}
    for at in count(group, stride):
        program = Program(tmp_path / str(at), "ram", skips_resets=False, following=True, **options)
        program.add("plain", "plain")
        error = interrupted(program.buffer.end_episodes, at=at)
        program.add("plain", "end")
        program.buffer.end_episodes()
        program.buffer.flush()
        assert program.buffer.num_steps == program.buffer.num_added == 4 * SIZE
        program.end()
        if error is None:
            break


@pytest.mark.parametrize("stride", [61, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "again"), [("ram", False), ("step", False), ("step", True), ("written", True)], indirect=["mode"]
)
def test_a_reset_that_is_interrupted_is_left_out_and_no_step_behind_it(
    tmp_path: Path, mode: str, again: bool, stride: int
) -> None:
    """Also where it is given again as the steps that came with it are lost."""
    for at in count(0, stride):
        program = Program(tmp_path / str(at), mode, skips_resets=True, following=False)
        program.add("plain", "end")
        recorded, reset = program.environments.recorded, program.step("plain")
        error = interrupted(partial(program.buffer.add, **reset), at)
        if again and not {tuple(row) for row in reset["observation"][recorded].tolist()} <= steps_in(program.buffer):
            program.buffer.add(**reset)
        following = program.step("plain")
        program.buffer.add(**following)
        program.end()
        assert {tuple(row) for row in following["observation"].tolist()} <= steps_in(program.folder), error
        if error is None:
            break


@pytest.mark.parametrize("stride", [61, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["ram", "step"], indirect=True)
def test_an_end_of_a_step_that_is_interrupted_is_not_taken_for_one_behind_end_episodes(
    tmp_path: Path, mode: str, stride: int
) -> None:
    """Which tells that the environment was reset already."""
    for at in count(0, stride):
        how = {"spare_slots": 4, "skips_resets": True, **MODES[mode]}
        buffer = ReplayBuffer(tmp_path / str(at), 20, 9, {"x": "int", "terminated": "bool"}, **how)
        steps = [{"x": np.array([t, 100 + t]), "terminated": np.array([t == 2, False])} for t in range(5)]
        buffer.add(**steps[0])
        buffer.add(**steps[1])
        error = interrupted(partial(buffer.add, **steps[2]), at)
        buffer.end_episodes([0])
        buffer.add(**steps[3])
        buffer.add(**steps[4])
        buffer.end_episodes()
        stored = {int(x) for i in range(len(buffer)) for x in buffer.episode(i)["x"]}
        assert {3, 4, 103, 104} <= stored, error
        buffer.close()
        if error is None:
            break


def test_timesteps_that_a_full_disk_cut_off_may_be_given_again_from_any_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `skips_resets` what is a reset of the first of them is so again."""
    append = get_inside("append_round")
    for again, expected in ((0, [1, 2, 2, 3, 3, 5]), (2, [1, 2, 3, 5])):
        buffer = ReplayBuffer(
            tmp_path / str(again), 20, 9, {"x": "int", "terminated": "bool"}, publish="step", skips_resets=True
        )
        buffer.add(x=1, terminated=False)
        left = [3]

        def append_until(*arguments: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "full")
            append(*arguments)

        x, terminated = np.array([2, 3, 4, 5]), np.array([False, True, False, False])  # 4 is a reset
        with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
            set_inside(patch, append_round=append_until)
            buffer.extend(x=x, terminated=terminated)
        buffer.extend(x=x[again:], terminated=terminated[again:])
        buffer.end_episodes()
        assert sorted(int(x) for i in range(len(buffer)) for x in buffer.episode(i)["x"]) == expected
        buffer.close()


def test_arrays_that_are_used_again_behind_an_error_change_nothing_of_a_step_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"x": Field("int", final=True), "terminated": "bool"}
    buffer = ReplayBuffer(tmp_path, 20, 9, fields, {"task": "int"}, publish="step", spare_slots=4)
    step = {"x": np.array([0, 100]), "next_x": np.array([1, 101]), "task": np.array([7, 7])}
    over = np.zeros(2, np.bool_)

    def full(*_: Any) -> None:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, "full")

    for t in range(3):
        if t == 2:
            set_inside(monkeypatch, tell_readers=full)
        with pytest.raises(OSError, match="full") if t == 2 else nullcontext():
            buffer.add(**step, terminated=over)
        for name in ("x", "next_x", "task"):
            step[name] += 1
    step["x"] += 50
    buffer.add(**step, terminated=over)
    buffer.end_episodes()
    assert [buffer.episode(i)["x"].tolist() for i in range(2)] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert [int(buffer.episode(i)["task"]) for i in range(4)] == [9, 9, 10, 10]
    assert buffer.num_added == buffer.num_steps == 8


@pytest.mark.parametrize(
    ("ends", "stride"), [(False, 5), (True, 43), *(pytest.param(ends, 2, marks=pytest.mark.slow) for ends in (0, 1))]
)
@pytest.mark.parametrize("mode", ["ram", "step"], indirect=True)
def test_whatever_was_given_with_a_step_is_known_if_the_step_is_stored_when_it_is_interrupted(
    tmp_path: Path, mode: str, ends: bool, stride: int
) -> None:
    """Also where its arrays are used again at once."""
    fields = {"number": Field("int", final=True), "terminated": "bool"}
    for at in count(0, stride):
        buffer = ReplayBuffer(
            tmp_path / str(at), 50, 6, fields, {"task": "int"}, circular=True, spare_slots=4, **MODES[mode]
        )
        steps = [
            {"number": numbers, "next_number": numbers + 1, "task": numbers + 2, "priority": numbers + 3.0}
            for numbers in (np.array([t, 100 + t]) for t in range(5))
        ]
        for step in steps[:3]:
            buffer.add(**step, terminated=np.zeros(2, np.bool_))
        step = {**steps[3], "terminated": np.array([ends, False])}
        error = interrupted(partial(buffer.add, **step), at)
        num_added = buffer.num_added
        for values in step.values():
            values[:] = 0
        buffer.add(**steps[4], terminated=np.zeros(2, np.bool_))
        buffer.end_episodes()
        assert num_added + 2 == buffer.num_added == buffer.num_steps, error
        for episode in (buffer.episode(i) for i in range(len(buffer))):
            numbers, has_final = episode["number"].tolist(), len(episode["number"]) > len(episode["terminated"])
            assert episode["task"] == numbers[-1 - has_final] + 2, error
            assert not has_final or numbers[-1] == numbers[-2] + 1, error
            assert has_final or num_added == 6, error
        buffer.sample(1, timestep_level=True, prioritized=Prioritized(alpha=1.0))
        items = buffer.batch(timestep_level=True, return_indices=True)
        np.testing.assert_allclose(buffer.priorities(items["_indices"]), items["number"] + 3, rtol=1e-4)
        buffer.close()
        if error is None:
            break


def test_the_errors_of_steps_that_a_full_disk_kept_from_publication_are_of_no_other_episode(tmp_path: Path) -> None:
    """Their serials were given to others; each of the steps here has the error that is its number."""
    fields = {"number": "int", "terminated": "bool", "truncated": "bool"}
    numbers, none = np.arange(3) * 10, np.zeros(3, np.bool_)
    for at in count(1):
        buffer = ReplayBuffer(tmp_path / str(at), 50, 6, fields)
        buffer.add(number=numbers, terminated=none, truncated=none, priority=numbers + 1.0)
        try:
            with system(at, error=errno.ENOSPC, lasting=True):
                buffer.add(number=numbers + 1, terminated=~none, truncated=none, priority=numbers + 2.0)
            failed = False
        except OSError:
            failed = True
        for first in range(100, 104):
            numbered = np.array([first, first + 50])
            buffer.store_episode(number=numbered, terminated=[0, 1], truncated=[0, 0], priority=numbered + 1.0)
        buffer.end_episodes()
        buffer.sample(1, timestep_level=True, prioritized=Prioritized(alpha=1.0))
        items = buffer.batch(timestep_level=True, return_indices=True)
        np.testing.assert_allclose(buffer.priorities(items["_indices"]), items["number"] + 1, rtol=1e-4)
        buffer.close()
        if not failed:
            break


# The mode, whether a reset is a step, whether `next_observation` is given, how many lines lie between interruptions.
SOME = [("ram", True, True, 307), ("disk", False, False, 307), ("step", False, True, 307), ("step", True, False, 307)]
SOME += [("written", True, True, 503), ("power", False, False, 503)]
MANY = [(mode, reset, following, 17) for mode in MODES for reset in (False, True) for following in (False, True)]


@pytest.mark.parametrize(
    ("mode", "skips_resets", "following", "stride"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)],
    indirect=["mode"],
)
def test_after_an_interruption_at_any_line_every_item_leads_to_what_followed(
    tmp_path: Path, mode: str, skips_resets: bool, following: bool, stride: int
) -> None:
    some = programs(tmp_path, mode, skips_resets=skips_resets, following=following)
    for number, (*before, kind) in enumerate(KINDS.values()):
        for at in count(number * 31 % stride, stride):
            program = next(some)
            program.add(*before)
            error = program.interrupted_add(kind, partial(interrupted, at=at))
            program.add("plain", "plain")
            if error is None:
                break
    program.end()


@pytest.mark.parametrize(
    ("mode", "skips_resets", "following", "errors"),
    [("ram", False, True, False), ("disk", True, False, True), ("written", True, True, True), ("step", *3 * [False])],
    indirect=["mode"],
)
def test_after_an_error_at_any_write_every_item_leads_to_what_followed(
    tmp_path: Path, mode: str, skips_resets: bool, following: bool, errors: bool
) -> None:
    program = Program(tmp_path / "program", mode, skips_resets=skips_resets, following=following, errors=errors)
    failed = 0
    for *before, kind in KINDS.values():
        for at in range(1, 200, 3):
            program.add(*before)
            written, error = program.interrupted_add(kind, partial(failing, at))
            program.add("plain", "plain")
            failed += error is not None
            if written < at:
                break
    program.end()
    assert failed > (3 if mode == "ram" else 10)


def failing(at: int, work: Callable[[], Any]) -> tuple[int, OSError | None]:
    """Do what finds a full disk at a write; how many were made, and the error."""
    error = None
    with system(at, error=errno.ENOSPC, only=("pwrite",)) as seen:
        try:
            work()
        except OSError as raised:
            error = raised
    return seen.count, error


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("interrupt", [failing, lambda at, work: interrupted(work, 37 * at)], ids=["ENOSPC", "signal"])
def test_after_a_step_that_was_interrupted_a_ring_still_forgets_the_oldest_first(
    tmp_path: Path, interrupt: Callable[..., Any], again: bool
) -> None:
    program = Program(tmp_path, "step", skips_resets=False, following=True, capacity=6 * SIZE)
    added: list[set[tuple[int, ...]]] = []
    for at in range(1, 60):
        step = program.environments.step(ENDS["end" if at % 5 == 0 else "plain"])
        rows = {tuple(row) for row in step["observation"].tolist()}
        for _ in range(1 + again):
            if not rows <= steps_in(program.buffer):
                interrupt(at % 20, partial(program.buffer.add, **step)) if at % 3 == 0 else program.buffer.add(**step)
        if rows <= steps_in(program.buffer):
            added.append(rows)
        assert steps_in(tmp_path) == set().union(*added[-6:])
    assert len(added) > 40


SIGNALLED = """
    import random, signal, sys, time
    from pathlib import Path
    import pytest
    from inside import set_inside
    from test_whole_steps import ENDS, Program

    from memmap_buffer import ReplayBuffer

    folder, mode, count, skips_resets = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
    rng, hits, told, armed, took = random.Random(count), 0, [], False, 2e-3
    if mode == "written":
        set_inside(pytest.MonkeyPatch(), stores_are_writes=lambda path: False)

    def fire(*_):
        if armed:  # a signal may be under way when its timer is stopped
            raise KeyboardInterrupt

    def interrupted(add):
        global hits, armed
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, took))  # the last line on which nothing is given
            add()
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:
            armed = False
            hits += 1
            told.append(error)  # with its frames
            trace = error.__traceback__
            while trace.tb_next.tb_frame.f_code is not fire.__code__:
                trace = trace.tb_next
            code = trace.tb_frame.f_code
            line = (trace.tb_lineno or code.co_firstlineno) - code.co_firstlineno
            if (code, line) in ((ReplayBuffer.add.__code__, 0), *((interrupted.__code__, at) for at in (3, 4))):
                add()  # which nobody had given

    signal.signal(signal.SIGALRM, fire)

    for i in range(count):  # until there were enough, however fast this machine is
        if hits >= count:
            break
        program = Program(folder / str(i), mode, skips_resets=skips_resets, following=i % 2 == 0, errors=i % 3 == 0)
        for _ in range(20):
            kinds, began = rng.choices(list(ENDS), [5, 1, 1], k=rng.randrange(1, 3)), time.perf_counter()
            program.add(*kinds)
            took = (time.perf_counter() - began) / len(kinds)
            program.interrupted_add(rng.choice(list(ENDS)), interrupted)
        program.end()
    print(hits)
"""


@pytest.mark.parametrize(
    ("mode", "skips_resets", "times"),
    [("ram", False, 50), ("step", True, 50)]
    + [pytest.param(mode, resets, 1000, marks=pytest.mark.slow) for mode in MODES for resets in (False, True)],
)
def test_after_signals_every_item_leads_to_what_followed(
    tmp_path: Path, mode: str, skips_resets: bool, times: int
) -> None:
    """Real ones, at any instruction; every traceback is kept."""
    program = [sys.executable, "-c", textwrap.dedent(SIGNALLED), str(tmp_path), mode, str(times), str(skips_resets)]
    paths = os.pathsep.join([*map(str, (Path(__file__).parent, Path(__file__).parents[1] / "support")), *sys.path])
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= times
