"""A ring of N timesteps: what is left of it is the newest N that were published, exactly, to every view and process."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import KILLED, in_child, system, without_barriers
from hypothesis import given
from hypothesis import strategies as st
from inside import changes_of, files_of, opened, take_lock
from profiles import examples
from reference import Episode, Reference
from specification import JOURNAL
from strategies import MEMORY, assert_indexed, assert_view

from memmap_buffer import NStep, Prioritized, ReplayBuffer, Window, pack, unpack, verify

FIELDS = {"id": "int", "terminated": ("bool", (), False), "truncated": ("bool", (), False)}
LIMIT, SLOTS = 12, 60
few = examples(25)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    without_barriers(monkeypatch)


def make(folder: Path | str, capacity: int = 20, **options: Any) -> ReplayBuffer:
    sizes = {"max_episodes": SLOTS, "max_timesteps": LIMIT, "circular": True, "spare_slots": 9}
    return ReplayBuffer(folder, fields=FIELDS, capacity=capacity, **{**sizes, **options})


def ids(buffer: ReplayBuffer) -> list[int]:
    """The steps that are left, by their numbers."""
    if not buffer.num_steps:
        return []
    return sorted(buffer.batch(timestep_level=True, fields=["id"])["id"].tolist())


@dataclass(eq=False)
class Told:
    """An episode as it was told: the number of each step, and how many are published."""

    steps: list[int] = field(default_factory=list)
    ended: str = ""
    published: int = 0


class Model:
    """A ring as a list of published steps.

    Attributes:
        rounds: the numbers of the steps, in the order of their publication; those of a vector's step together, as
            which of one round leave first is the buffer's affair.
        told: every episode.
        count: of steps so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rounds: list[list[int]] = []
        self.told: list[Told] = []
        self.count = 0

    def new_step(self, episode: Told) -> int:
        episode.steps.append(self.count)
        self.count += 1
        return episode.steps[-1]

    def publish(self, *groups: list[int]) -> None:
        self.rounds += [group for group in groups if group]

    def drop(self, gone: set[int]) -> None:
        self.rounds = [[step for step in group if step not in gone] for group in self.rounds]

    def settle(self, seen: list[int]) -> None:
        """What is seen is the newest, and nothing else; what is not seen does not come back."""
        assert len(seen) == min(sum(map(len, self.rounds)), self.capacity)
        assert_newest(self.rounds, seen)
        self.drop({step for group in self.rounds for step in group} - {*seen})

    def reference(self, buffer: ReplayBuffer) -> Reference:
        """What is left, as the slow definition knows it."""
        left, known = {step for group in self.rounds for step in group}, Reference({"id": 0}, {"id": 0}, 10**6)
        serial_of = serials(buffer)
        for one in self.told:
            steps = one.steps[: one.published]
            kept = [step for step in steps if step in left]
            if kept:
                last = {name: one.ended == name for name in ("terminated", "truncated")}
                rows: dict[str, list[Any]] = {"id": [np.int64(step) for step in kept]}
                for name, is_last in last.items():
                    rows[name] = [np.bool_(is_last and step == one.steps[-1]) for step in kept]
                known.episodes.append(Episode(rows, {}, {}, serial_of[kept[0]], len(steps) - len(kept)))
                assert steps[-len(kept) :] == kept
        known.episodes.sort(key=lambda episode: episode.serial)
        return known


def assert_newest(rounds: Iterable[Iterable[int]], seen: list[int]) -> None:
    """What is seen is the newest of what was published: all of each round but of the oldest one."""
    left = set(seen)
    assert len(left) == len(seen)
    for group in reversed([*rounds]):
        assert left >= {*group} or left < {*group}, "an older step was kept in the place of a newer one"
        left -= {*group}
    assert not left, "this was never published, or had left"


def serials(buffer: ReplayBuffer) -> dict[int, int]:
    """The serial of the episode of each step."""
    batch = buffer.batch(timestep_level=True, fields=["id"], return_indices=True)
    return dict(zip(batch["id"].tolist(), batch["_indices"][:, 0].tolist(), strict=True))


def assert_all_views(buffer: ReplayBuffer, model: Model, *, thorough: bool = False) -> None:
    """Steps, whole episodes, n-step items, windows and stacks are those of what is left."""
    model.settle(ids(buffer))
    left = sum(map(len, model.rounds))
    assert buffer.num_steps == left
    if not left:
        assert buffer.num_episodes == 0
        return
    known = model.reference(buffer)
    whole = [episode for episode in known.episodes if not episode.forgotten]
    assert buffer.serials.tolist() == [episode.serial for episode in whole]
    assert buffer.episode_lens.tolist() == [episode.length for episode in whole]
    assert [buffer.episode(i)["id"].tolist() for i in range(len(whole))] == [one.steps["id"] for one in whole]
    stacked = {"current_fields": ["id"], "next_fields": ["id"], "stack": {"id": 3}}
    cases: list[tuple[Callable[[Episode], Any], dict[str, Any]]] = [
        (lambda one: known.timesteps(one, ["id"]), {"timestep_level": True, "fields": ["id"]}),
        (lambda one: known.transitions(one, 3, ["id"]), {"view": NStep(3, ["id"], ["id"])}),
        (lambda one: stacks(known, one), {"n_steps": 1, **stacked}),
        (lambda one: known.trajectory(one, ["id"]), {"fields": ["id"], "return_mask": True}),
    ]
    for boundary in ("pad", "drop", "shift"):
        for stride, before in ((1, 0), (3, 0), (2, 3 * (boundary == "pad"))):
            view = Window(4, stride, fields=["id"], boundary=boundary, pad_before=before)
            cases.append(
                (
                    lambda one, boundary=boundary, stride=stride, before=before: known.windows(
                        one, 4, ["id"], stride, boundary, pad_before=before
                    ),
                    {"view": view},
                )
            )
    for cut, options in cases:
        items = known.items(cut)
        zeros = known.zeros if "return_mask" in options else None
        if thorough:
            assert_view(buffer, items, zeros=zeros, **options)
        elif items:
            batch = buffer.batch(return_indices=True, **options)
            assert assert_indexed(batch, items, zeros) == list(items)


def stacks(known: Reference, one: Episode) -> dict[int, dict[str, Any]]:
    items = known.transitions(one, 1, ["id"])
    for t, item in items.items():
        for prefix, last in (("", t), ("next_", t + 1)):
            item[f"{prefix}id"] = known.around(one, "id", range(last - 2, last + 1), final=True)[0]
    return items


# Any recording against the model


class Player:
    """Does to a buffer what it does to a model of it."""

    def __init__(self, folder: Path | str, capacity: int, publish: str) -> None:
        self.buffer = make(folder, capacity, publish=publish)
        self.folder, self.publish, self.model = folder, publish, Model(capacity)
        self.other = ReplayBuffer.from_folder(folder, read_only=True)
        self.running: list[Told] = []

    def add(self, ends: list[int]) -> None:
        """A step of each environment: 0 goes on, 1 terminates, 2 truncates; another number of them begins anew."""
        if len(self.running) != len(ends):
            self.end_all()
            self.running = [Told() for _ in ends]
            self.model.told += self.running
        at_once, whole = [], []
        step = [self.model.new_step(one) for one in self.running]
        flags = {"terminated": [end == 1 for end in ends], "truncated": [end == 2 for end in ends]}
        self.buffer.add(id=step, **flags)
        for i, (one, end) in enumerate(zip(self.running, ends, strict=True)):
            at_once.append(one.steps[-1])
            one.ended = ("", "terminated", "truncated")[end]
            if end or len(one.steps) == LIMIT:
                whole.append(one)
                self.running[i] = Told()
                self.model.told.append(self.running[i])
        if self.publish == "step":
            self.model.publish(at_once)
            for one in self.model.told:
                one.published = len(one.steps)
        else:
            self.show(*whole)

    def show(self, *episodes: Told) -> None:
        """Whole episodes, one after the other."""
        for one in episodes:
            self.model.publish(*([step] for step in one.steps[one.published :]))
            one.published = len(one.steps)

    def end_all(self) -> None:
        self.buffer.end_episodes()
        self.show(*self.running)
        self.running = []

    def whole(self, length: int) -> None:
        one = Told(ended="terminated" if length % 2 else "")
        steps = [self.model.new_step(one) for _ in range(length)]
        last = np.arange(length) == length - 1
        self.buffer.store_episode(id=steps, terminated=last & bool(one.ended))
        self.model.told.append(one)
        self.show(one)

    def reopen(self) -> None:
        self.buffer.close()
        self.show(*self.running)
        self.running = []
        self.buffer = ReplayBuffer.from_folder(self.folder, publish=self.publish)

    def delete(self, which: int) -> None:
        if self.running or not self.buffer.num_episodes:
            return
        i = which % self.buffer.num_episodes
        gone = {*self.buffer.episode(i)["id"].tolist()}
        self.buffer.delete(i)
        self.model.drop(gone)

    def clear(self) -> None:
        if not self.running:
            self.buffer.clear()
            self.model.rounds = []

    def play(self, what: str, value: Any) -> None:
        getattr(self, what)(*value)


vectors = st.integers(1, 5).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, 2]), min_size=size, max_size=size), min_size=1, max_size=20
    )
)
calls = st.one_of(
    *[vectors.map(lambda ends: [("add", (end,)) for end in ends])] * 4,
    st.integers(1, LIMIT).map(lambda length: [("whole", (length,))]),
    st.sampled_from([[("reopen", ())], [("end_all", ())], [("clear", ())]]),
    st.integers(0, 9).map(lambda which: [("end_all", ()), ("delete", (which,))]),
)


@pytest.mark.parametrize("publish", ["step", "episode"])
@few
@given(st.lists(calls, min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 9))
def test_what_is_left_is_the_newest_steps_to_every_view_and_to_another_reader(
    publish: str, calls: list[Any], capacity: int, often: int
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        player = Player(folder, capacity, publish)
        for number, (what, value) in enumerate(call for group in calls for call in group):
            player.play(what, value)
            if number % often == 0:
                assert_all_views(player.other, player.model)
            else:
                player.model.settle(ids(player.buffer))
        assert_all_views(player.buffer, player.model, thorough=True)
        assert_all_views(player.other, player.model)
        assert_all_views(ReplayBuffer.from_folder(folder, read_only=True), player.model)
        player.buffer.close()
        assert [finding for finding in verify(folder) if finding.lost] == []


def test_up_to_as_many_episodes_are_trimmed_at_once_as_there_are_environments(tmp_path: Path) -> None:
    with make(tmp_path, 8, publish="step") as buffer:
        for t in range(6):
            buffer.add(id=[10 * i + t for i in range(4)], terminated=[False] * 4)
        assert ids(buffer) == [4, 5, 14, 15, 24, 25, 34, 35]
        assert buffer.num_episodes == 0 and buffer.num_steps == 8
        table = opened(tmp_path).table
        assert table.start[table.visible].tolist() == [4] * 4


def test_an_episode_longer_than_the_ring_keeps_its_last_steps(tmp_path: Path) -> None:
    for publish in ("step", "episode"):
        with make(tmp_path / publish, 5, publish=publish) as buffer:
            buffer.store_episode(id=range(3))
            buffer.store_episode(id=range(10, 22))
            assert ids(buffer) == [17, 18, 19, 20, 21]
            assert len(buffer) == 0
            buffer.store_episode(id=[30])
            assert ids(buffer) == [18, 19, 20, 21, 30] and buffer.serials.tolist() == [2]


def test_an_open_episode_that_was_emptied_is_seen_again_at_its_next_step(tmp_path: Path) -> None:
    with make(tmp_path, 4, publish="step") as buffer, ReplayBuffer.from_folder(tmp_path, read_only=True) as other:
        episode = buffer.begin_episode()
        episode.extend(id=[0, 1])
        buffer.store_episode(id=range(2, 6))
        assert ids(buffer) == ids(other) == [2, 3, 4, 5]
        buffer.delete([0])
        assert ids(buffer) == ids(other) == []
        episode.store(id=6)
        assert ids(buffer) == ids(other) == [6]


def test_a_ring_that_is_trimmed_beside_max_episodes_never_shows_a_retired_episode_again(tmp_path: Path) -> None:
    with make(tmp_path, 10, publish="step", max_episodes=2, spare_slots=3) as buffer:
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        old, between = buffer.begin_episode(), buffer.begin_episode()
        between.store(id=0)
        for t in range(1, 11):
            old.store(id=t)
        assert ids(buffer) == list(range(1, 11))  # `between` is open, and nothing is left of it
        buffer.store_episode(id=[20])
        assert ids(buffer) == ids(reader) == ids(ReplayBuffer.from_folder(tmp_path, read_only=True))
        between.publish()
        old.publish()
        buffer.store_episode(id=[21])
        assert ids(buffer) == ids(reader) == [20, 21]


def test_what_is_drawn_is_left_and_each_of_it_is(tmp_path: Path) -> None:
    with make(tmp_path, 30, publish="step") as buffer:
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        for t in range(60):
            ends = [t % 7 == 6, t % 11 == 10, False]
            buffer.add(id=[3 * t + i for i in range(3)], terminated=ends)
            left = ids(buffer)
            for source in (buffer, reader):
                drawn = source.sample(400, timestep_level=True, seed=t)["id"].tolist()
                assert {*drawn} <= {*left}
                if t % 20 == 19:
                    assert {*drawn} == {*left}
                assert t < 2 or {*source.sample(20, n_steps=3, seed=t)["id"].tolist()} <= {*left}


def test_draws_by_priority_see_what_is_left(tmp_path: Path) -> None:
    with make(tmp_path, 12, publish="step") as buffer:
        for t in range(60):
            buffer.add(id=[2 * t, 2 * t + 1], terminated=[t % 9 == 8, t % 5 == 4])
            batch = buffer.sample(16, timestep_level=True, prioritized=Prioritized(), return_indices=True, seed=t)
            assert {*batch["id"].tolist()} <= {*ids(buffer)}


# Readers of other processes


@contextmanager
def looker(folder: Path) -> Iterator[ReplayBuffer]:
    """A reader that knows the folder only by what lies in it."""
    reader = ReplayBuffer.from_folder(folder, read_only=True)
    ids(reader)
    yield reader


@pytest.mark.parametrize("changes", [1, 7, JOURNAL // 2, JOURNAL // 2 + 1, JOURNAL, JOURNAL + 1, 3 * JOURNAL + 5])
def test_a_reader_that_looks_seldom_finds_all_that_changed(tmp_path: Path, changes: int) -> None:
    """Also more than the journal holds, whose entries were written over meanwhile."""
    with make(tmp_path, 25, publish="step") as buffer, looker(tmp_path) as reader:
        count = 0
        for _ in range(2):
            seen = changes_of(tmp_path)
            while changes_of(tmp_path) < seen + changes:
                buffer.add(id=count, terminated=count % 10 == 9)
                count += 1
            assert ids(reader) == ids(buffer) == list(range(max(0, count - 25), count))


def test_a_change_tells_its_slots_and_one_of_too_many_that_all_may_have_changed(tmp_path: Path) -> None:
    with make(tmp_path, 10, publish="step") as buffer:
        storage = opened(tmp_path)
        buffer.store_episode(id=range(3))
        before = storage.changes
        buffer.store_episode(id=[3])
        assert storage.changed_since(storage.changes).tolist() == []
        assert storage.changed_since(before).tolist() == [1]
        buffer.store_episode(id=range(4, 12))  # the first one loses two of its steps
        assert storage.changed_since(before).tolist() == [0, 1, 2]
        assert storage.changed_since(storage.changes + 1) is None
        before = storage.changes
        buffer.clear()
        assert storage.changed_since(before) is None


def test_a_reader_of_another_process_never_sees_what_had_left(tmp_path: Path) -> None:
    capacity = 200

    def write(tell: Callable[[Any], None]) -> None:
        buffer, count = make(tmp_path, capacity, publish="step"), 0
        tell(0)
        while True:
            buffer.add(id=count, terminated=count % 10 == 9)
            count += 1

    with writing(write):
        stop, newest = time.monotonic() + 2, -1
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        while time.monotonic() < stop or newest < 10 * capacity:
            if reader.num_steps:
                steps = reader.sample(64, timestep_level=True)["id"]
                assert steps.min() > newest - capacity - 1  # what had left before does not come back
                newest = max(newest, int(steps.max()))


@contextmanager
def writing(work: Callable[[Any], None]) -> Iterator[int]:
    """A child that works until it is killed."""
    get, put = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(lambda _: os.write(put, b"x"))
        finally:
            os._exit(1)
    try:
        assert os.read(get, 1) == b"x"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(get)
        os.close(put)


# Kills


def work_of(buffer: ReplayBuffer, tell: Callable[[Any], None]) -> None:
    """Steps of two environments, and whole episodes in between, each told when it is acknowledged."""
    for number, steps in enumerate(WORK):
        if len(steps) == 2:
            buffer.add(id=steps, terminated=[number % 3 == 2, False])
        else:
            buffer.end_episodes()
            buffer.store_episode(id=steps)
        tell(steps[-1] + 1)


WORK = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9, 10], [11, 12], [13, 14], [15, 16], [17, 18], [19, 20, 21], [22, 23]]


@pytest.mark.parametrize("half", [False, True], ids=["before it", "in the middle of a write"])
def test_a_writer_that_is_killed_at_any_operation_leaves_the_newest_steps(tmp_path: Path, half: bool) -> None:
    """Every sixth operation; the next writer shows exactly as many as fit, and goes on."""
    capacity, at = 8, 1 + half
    while True:
        folder = tmp_path / str(at)
        make(folder, capacity, publish="step").close()

        def work(tell: Callable[[Any], None], at: int = at, folder: Path = folder) -> None:
            buffer = ReplayBuffer.from_folder(folder, publish="step")
            take_lock(buffer)
            with system(at, kill=True, half=half):
                work_of(buffer, tell)

        child = in_child(work)
        promised = child.told[-1] if child.told else 0
        before = assert_left(ReplayBuffer.from_folder(folder, read_only=True), promised, capacity)
        with ReplayBuffer.from_folder(folder, publish="step") as buffer:
            assert assert_left(buffer, promised, capacity) == before
            buffer.add(id=1000, terminated=False)
            assert_newest(
                [*(steps for steps in WORK if steps[0] < promised), set(before) - {*range(promised)}, [1000]],
                ids(buffer),
            )
            assert len(ids(buffer)) == min(capacity, len(before) + 1)
            buffer.end_episodes()
        assert [finding for finding in verify(folder) if finding.lost] == []
        if child.status != KILLED:
            break
        at += 6
    assert at > 100


def assert_left(buffer: ReplayBuffer, promised: int, capacity: int) -> list[int]:
    """All that was acknowledged and fits is there; and of one call that was not, what it had published by then."""
    left = ids(buffer)
    call = next((steps for steps in WORK if steps[0] == promised), [])
    more = [step for step in left if step >= promised]
    assert {*more} <= {*call}
    needed, kept = capacity, set(left)
    for steps in reversed([*(steps for steps in WORK if steps[0] < promised), more]):
        assert len(kept & {*steps}) >= min(needed, len(steps)), (promised, left)
        needed = max(0, needed - len(steps))
    # What is new is shown, then the oldest steps leave, episode by episode.
    assert min(capacity, promised + len(more)) <= len(left) <= capacity + len(more)
    return left


# What it takes and leaves


def test_the_disk_has_what_is_visible_and_an_episode_an_environment(tmp_path: Path) -> None:
    """Over ten wraps, with episodes of very different lengths, where a folder may have holes."""
    row, longest, capacity, envs = 8192, 200, 400, 2
    fields = {"image": ("uint8", (row,)), "id": "int", "terminated": ("bool", (), False)}
    sizes = {"max_timesteps": longest, "circular": True, "spare_slots": envs, "capacity": capacity}
    rng = np.random.default_rng(0)
    with ReplayBuffer(tmp_path, 5000, fields=fields, publish="step", **sizes) as buffer:
        if not files_of(buffer).holes_are_harmless:
            pytest.skip("a tmpfs keeps what it has")
        image, most, left = np.ones((envs, row), np.uint8), 0, rng.integers(1, longest, envs)
        for t in range(10 * capacity // envs):
            left -= 1
            buffer.add(image=image, id=[t] * envs, terminated=left == 0)
            left = np.where(left == 0, rng.choice([1, 5, longest - 1], envs), left)
            if t % 50 == 0:
                most = max(most, (tmp_path / "data" / "image.npy").stat().st_blocks * 512)
        assert buffer.num_steps == capacity
    assert most <= (capacity + (envs + 1) * longest) * row + 2**20


def test_rings_are_copied_packed_and_unpacked_as_they_are(tmp_path: Path) -> None:
    with make(tmp_path / "ring", 10, publish="step") as buffer:
        for t in range(15):
            buffer.add(id=[2 * t, 2 * t + 1], terminated=[t % 6 == 5, t % 4 == 3])
        left = ids(buffer)
        assert len(left) == 10
        buffer.snapshot(tmp_path / "copy")
        pack(tmp_path / "ring", tmp_path / "packed")
        unpack(tmp_path / "packed", tmp_path / "again", circular=True, capacity=10, spare_slots=3)
        unpack(tmp_path / "ring", tmp_path / "straight", circular=True, capacity=10, spare_slots=3)
        assert ids(buffer) == left
    for name in ("copy", "packed", "again", "straight"):
        assert verify(tmp_path / name) == [], name
        assert ids(ReplayBuffer.from_folder(tmp_path / name, read_only=True, verify="always")) == left, name
    for name in ("copy", "again", "straight"):
        with ReplayBuffer.from_folder(tmp_path / name) as buffer:
            buffer.store_episode(id=[100, 101, 102])
            assert ids(buffer) == [*left[3:], 100, 101, 102], name


def test_an_episode_that_a_ring_gave_up_while_it_was_open_is_none_that_verify_calls_lost(tmp_path: Path) -> None:
    """Its end writes no meta fields anew: the record of that would vouch for an odd generation."""
    options: dict[str, Any] = {"capacity": 100, "spare_slots": 4, "publish": "step"}
    fields, meta = {"id": "int", "terminated": "bool"}, {"task": "int"}
    with ReplayBuffer(tmp_path, 2, 9, fields, meta, circular=True, **options) as buffer:
        for t in range(5):
            buffer.add(id=[-t, t], terminated=[False, True], task=[t, t])
        buffer.end_episodes()
        assert ids(buffer) == [3, 4]
    assert [finding for finding in verify(tmp_path) if finding.lost] == []


def test_positions_to_pack_are_those_of_whole_episodes(tmp_path: Path) -> None:
    with make(tmp_path / "ring", 5) as buffer:
        for first in (0, 10, 20):
            buffer.store_episode(id=range(first, first + 2))
        assert ids(buffer) == [1, 10, 11, 20, 21]
        pack(buffer.folder, tmp_path / "packed", episodes=[0])
    assert ids(ReplayBuffer.from_folder(tmp_path / "packed", read_only=True)) == [10, 11]


def test_a_writer_that_opens_the_folder_again_counts_the_rounds_on(tmp_path: Path) -> None:
    """Else what it records would look older than what was there, and leave before it."""
    fields = {"x": "int"}
    for first in range(0, 24, 3):
        with ReplayBuffer(tmp_path, 20, 10, fields, circular=True, capacity=8) as buffer:
            buffer.store_episode(x=[first, first + 1, first + 2])
            shown = sorted(buffer.batch(timestep_level=True)["x"].tolist())
        assert shown == list(range(max(0, first - 5), first + 3))
